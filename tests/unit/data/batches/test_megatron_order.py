"""data.order = "megatron" against megatron-core's own samples, and against its rules written out in loops."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.data.batches.loader import BatchShare
from megalite.data.batches.megatron_loader import MegatronLoader
from megalite.data.batches.megatron_order import (
    MegatronOrder,
    blend_index,
    prepare_samples,
    set_index,
    split_ends,
    training_order,
    validation_order,
)
from megalite.data.files.token_file import TokenFile, TokenWriter, bin_path, idx_path
from megalite.errors import DataError
from tests.support.megatron_core_samples import CASES, CODE, NOTES, PARTS, WEB, Case, DataSet, recorded
from tests.support.tiny_run import SETTINGS

RECORDED = Path(__file__).with_name("megatron_core_samples.npz")


@pytest.mark.parametrize("name", CASES)
def test_the_samples_are_those_of_megatron_core(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    prefixes = [data_set.write(tmp_path) for data_set in case.sets]
    split = tuple(map(float, case.split.split(",")))
    with np.load(RECORDED) as arrays:
        for part, size in enumerate(case.sizes):
            if size:
                order = MegatronOrder(case.seed, case.length, size, part, split, case.weights)
                samples = prepare_samples(prefixes, order, tmp_path / "run")
                expected = arrays[f"{name}: {PARTS[part]}"]
                assert np.array_equal(samples.read(np.arange(len(samples))), expected)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_record_is_what_megatron_core_gives(name: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="megatron-core is not installed")
    with np.load(RECORDED) as arrays:
        for part, samples in recorded(CASES[name], tmp_path):
            assert np.array_equal(samples, arrays[f"{name}: {part}"])


def literal_samples(documents: Sequence[Sequence[int]], order: MegatronOrder) -> list[list[int]]:
    """The training samples of whole documents, a token at a time."""
    length, tokens = order.sequence_length, sum(map(len, documents))
    epochs, available = 1, tokens
    while available < order.samples * length + 1:
        epochs, available = epochs + 1, available + tokens
    separate, before_last = False, ((epochs - 1) * tokens - 1) // length
    if epochs > 1:
        separate = order.samples - before_last < int(0.8 * ((tokens - 1) // length))
    random = np.random.RandomState(order.seed)
    stream: list[int] = []
    for repeats in [epochs - 1, 1] if separate else [epochs]:
        numbers = np.array(list(range(len(documents))) * repeats, dtype=np.int32)
        random.shuffle(numbers)
        for number in numbers:
            stream.extend(documents[number])
    samples, at = [], 0
    while at + length < len(stream):
        samples.append(stream[at : at + length + 1])
        at += length
    groups = [samples[:before_last], samples[before_last:]] if separate else [samples]
    mixed = []
    for group in groups:
        places = np.arange(len(group), dtype=np.uint32)
        random.shuffle(places)
        mixed += [group[place] for place in places]
    return mixed


def write(prefix: Path, documents: Sequence[Sequence[int]], dtype: Any = np.uint16) -> Path:
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, np.dtype(dtype))
        for document in documents:
            writer.add(np.array(document, dtype=dtype))
            writer.end_document()
        writer.finish()
        writer.close()
    return prefix


@pytest.mark.extended
@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any),
    length=st.integers(1, 9),
    samples=st.integers(0, 60),
    seed=st.integers(0, 2**32 - 1),
)
@example([10, 10], 1, 34, 1)  # of the 19 samples of the last epoch 15 are needed: 80% after rounding down
@example([10, 10], 1, 33, 1)
def test_samples_of_any_size_are_those_of_the_rules(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, samples: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("order")
    numbers = iter(range(sum(lengths)))
    documents = [[next(numbers) for _ in range(count)] for count in lengths]
    order = MegatronOrder(seed, length, samples)
    ours = prepare_samples([write(folder / "x", documents)], order, folder)
    assert ours.read(np.arange(len(ours))).tolist() == literal_samples(documents, order)
    assert len(ours) >= samples


@pytest.mark.extended
@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20), st.integers(0, 80))
def test_each_sample_is_of_the_set_furthest_behind(weights: list[float], size: int) -> None:
    shares = np.array(weights) / np.sum(weights)
    shares = shares / np.sum(shares)
    taken, expected = [0] * len(weights), []
    for place in range(size):
        behind = [float(share) * max(place, 1) - count for share, count in zip(shares, taken, strict=True)]
        expected.append(behind.index(max(behind)))
        taken[expected[-1]] += 1
    assert blend_index(weights, size).tolist() == expected


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(0, 10**6))
def test_the_parts_of_a_split_follow_each_other(split: list[int], count: int) -> None:
    ends = [split_ends(split, part, count) for part in range(3)]
    used = [pair for pair, share in zip(ends, [*split, 0, 0], strict=False) if share]
    assert [first for first, _ in used] == [0, *(end for _, end in used[:-1])]
    assert used[-1][1] == count


def shares_of(layout: tuple[int, int]) -> Iterator[BatchShare]:
    ranks, micro = layout
    for rank in range(ranks):
        yield BatchShare(8, micro, 8 // (ranks * micro), rank, ranks)


@pytest.mark.parametrize("layout", [(1, 1), (1, 4), (2, 2), (4, 1), (8, 1)])
def test_the_ranks_of_every_layout_read_the_same_samples(tmp_path: Path, layout: tuple[int, int]) -> None:
    prefixes = [WEB.write(tmp_path), CODE.write(tmp_path)]
    order = MegatronOrder(3, 8, 40, weights=[2.0, 1.0])
    samples = prepare_samples(prefixes, order, tmp_path)
    rows: dict[int, tuple[list[int], list[int]]] = {}
    for share in shares_of(layout):
        batch = MegatronLoader(samples, share).step_batch(16)
        for place, *pair in zip(
            batch.sample_indices.tolist(), batch.input_ids.tolist(), batch.labels.tolist(), strict=True
        ):
            rows[place] = tuple(pair)
    expected = samples.read(np.arange(16, 24))
    assert sorted(rows) == list(range(16, 24))
    for place, row in enumerate(expected.tolist(), start=16):
        assert rows[place] == (row[:-1], row[1:])


def test_documents_are_separated_by_their_last_token(tmp_path: Path) -> None:
    """As --reset-position-ids and --reset-attention-mask of Megatron: position 0 behind each end of a document."""
    prefix = write(tmp_path / "x", [[5, 6, 0], [7, 0], [8, 9, 10, 0]])
    samples = prepare_samples([prefix], MegatronOrder(1, 7, 1), tmp_path)
    batch = MegatronLoader(samples, BatchShare(7, 1, 1), end_of_document_id=0).step_batch(0)
    [ids], [positions] = batch.input_ids.tolist(), batch.position_ids.tolist()
    assert batch.document_ids is not None
    restarts = [place for place in range(1, 7) if ids[place - 1] == 0]
    assert [place for place in range(1, 7) if positions[place] == 0] == restarts
    assert batch.document_ids.tolist()[0] == np.isin(np.arange(7), restarts).cumsum().tolist()


def test_the_indices_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, order = CODE.write(tmp_path), MegatronOrder(1, 8, 300)
    first = prepare_samples([prefix], order, tmp_path / "run").read(np.arange(300))
    monkeypatch.setattr("megalite.data.batches.megatron_order.set_index", None)
    mapped = prepare_samples([prefix], order, tmp_path / "run")
    assert np.array_equal(mapped.read(np.arange(300)), first)
    for other in (replace(order, seed=2), replace(order, samples=301), replace(order, sequence_length=9)):
        with pytest.raises(TypeError):  # another order is built
            prepare_samples([prefix], other, tmp_path / "run")


def test_a_document_of_any_length_costs_the_memory_of_a_sample(tmp_path: Path) -> None:
    """A document of 2**31 - 1 tokens, in a file with holes: an index or a token too many would not fit."""
    prefix = write(tmp_path / "x", [[1], [2]], np.uint8)
    longest = 2**31 - 1
    index = bytearray(idx_path(prefix).read_bytes())
    index[34:38] = longest.to_bytes(4, "little")
    index[50:58] = longest.to_bytes(8, "little")
    idx_path(prefix).write_bytes(index)
    with bin_path(prefix).open("wb") as file:
        file.truncate(longest + 1)
    samples = prepare_samples([prefix], MegatronOrder(1, 2**20, 4), tmp_path)
    assert samples.read(np.array([2])).sum() == 0


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [
        (34, (9).to_bytes(4, "little"), "sequences do not lie end to end"),
        (34, (2**32 - 1).to_bytes(4, "little"), "sequences do not lie end to end"),
        (18, (2**60).to_bytes(8, "little"), "bytes where its header says"),
        (0, b"NOINDEX", "is not a Megatron index"),
        (-8, (2**60).to_bytes(8, "little"), "documents do not cover the sequences"),
    ],
)
def test_a_damaged_index_is_one_error(tmp_path: Path, at: int, value: bytes, complaint: str) -> None:
    prefix = NOTES.write(tmp_path)
    index = bytearray(idx_path(prefix).read_bytes())
    at %= len(index)
    index[at : at + len(value)] = value
    idx_path(prefix).write_bytes(index)
    with pytest.raises(DataError, match=complaint):
        prepare_samples([prefix], MegatronOrder(1, 8, 10), tmp_path / "run")
    assert not list((tmp_path / "run").glob("*/*"))


def test_damaged_indices_of_ours_are_named(tmp_path: Path) -> None:
    prefix, order = CODE.write(tmp_path), MegatronOrder(1, 8, 300)
    prepare_samples([prefix], order, tmp_path / "run")
    [folder] = (tmp_path / "run").iterdir()
    np.save(folder / "samples-0.npy", np.arange(3))
    with pytest.raises(DataError, match=r"megatron-\w+ is damaged .*; delete it, and it is built again"):
        prepare_samples([prefix], order, tmp_path / "run")
    for damaged in (b"\x93NUMPY", b""):
        (folder / "samples-0.npy").write_bytes(damaged)
        with pytest.raises(DataError, match="delete it"):
            prepare_samples([prefix], order, tmp_path / "run")


def test_a_part_without_tokens_is_one_error() -> None:
    with pytest.raises(DataError, match=r"x has no token in sequences 0 to 0.*check data\.split"):
        set_index(np.array([3, 4], dtype=np.int32), 0, 0, MegatronOrder(1, 8, 10), "x")


def test_a_place_behind_the_last_sample_is_one_error(tmp_path: Path) -> None:
    samples = prepare_samples(
        [TokenFile.open(CODE.write(tmp_path)).prefix], MegatronOrder(1, 8, 10), tmp_path
    )
    with pytest.raises(DataError, match=r"and the run asks for sample 1,000,001; set training\.steps"):
        samples.read(np.array([0, 10**6]))


# Four sets of two samples each; the blend takes three of the second one.
FEW = Case(
    [DataSet(name, 1, 20, 20) for name in "abcd"],
    (1, 0, 0),
    split="100,0,0",
    weights=[0.0035, 0.3867, 0.0002, 0.0032],
)


def test_a_blend_that_takes_more_than_a_set_has_is_one_error(tmp_path: Path) -> None:
    prefixes = [data_set.write(tmp_path) for data_set in FEW.sets]
    with pytest.raises(DataError, match=r"b has 2 samples where the blend takes 3; Megatron refuses it too"):
        prepare_samples(prefixes, MegatronOrder(1234, 8, 1, weights=FEW.weights), tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
def test_megatron_core_refuses_it_too(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="megatron-core is not installed")
    with pytest.raises(IndexError, match="blend oversamples"):
        next(recorded(FEW, tmp_path))


def configured(**changes: Any) -> RunConfig:
    settings = {
        **SETTINGS,
        "training.steps": 9,
        "data.source": "text",
        "data.order": "megatron",
        "validation.every": 4,
        "validation.samples": 8,
        **changes,
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return load_run(None, flags).config


def test_the_settings_of_a_run_say_its_numbers_of_samples() -> None:
    """Training takes train-iters x global batch, validation (train-iters // eval-interval + 1) x eval samples."""
    config = configured(**{"data.split": "[969, 30, 1]", "run.seed": 5})
    train = MegatronOrder(5, 12, 9 * 4, 0, (969.0, 30.0, 1.0))
    assert training_order(config) == train
    assert validation_order(config) == replace(train, samples=(9 // 4 + 1) * 8, part=1)


def test_validation_data_of_its_own_is_read_whole() -> None:
    config = configured(**{"data.validation": "held"})
    assert training_order(config) == MegatronOrder(1234, 12, 36)
    assert validation_order(config) == MegatronOrder(1234, 12, 24)
