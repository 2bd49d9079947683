"""Samples cut from a token file, and the batch of a step on each data-parallel rank."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.batches.blend import SampleOrder
from megalite.data.batches.documents import require_ends
from megalite.data.batches.loader import BatchShare, LoadedBatch, StepLoader
from megalite.data.batches.packing import IGNORE_INDEX, PackedSamples
from megalite.data.files.token_file import TokenFile, TokenWriter, bin_path, idx_path
from megalite.errors import DataError
from megalite.parallel import cross_entropy
from megalite.parallel.step_batch import StepBatch
from tests.support import reported_faults as faults
from tests.support.museum import exhibit

LENGTH = 7


def token_file(folder: Path, tokens: int) -> TokenFile:
    """Ids 1, 2, 3, ... in documents of ten."""
    prefix = folder / "x"
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16))
        for start in range(1, tokens + 1, 10):
            writer.add(np.arange(start, min(start + 10, tokens + 1), dtype=np.uint16))
            writer.end_document()
        writer.finish()
        writer.close()
    return TokenFile.open(prefix)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return token_file(tmp_path_factory.mktemp("loader"), 500)


def loader(
    file: TokenFile, b: int = 2, m: int = 3, rank: int = 0, size: int = 1, **options: object
) -> StepLoader:
    padding = {name: options.pop(name) for name in ("pad_id", "document_mask") if name in options}
    order = SampleOrder(**{"seed": 5, **options})  # type: ignore[arg-type]
    return StepLoader(file, BatchShare(LENGTH, b, m, rank, size), order, **padding)  # type: ignore[arg-type]


def rows(batch: LoadedBatch) -> list[tuple[int, ...]]:
    """One tuple a row, of everything that belongs to it."""
    tensors = (batch.input_ids, batch.labels, batch.loss_mask, batch.position_ids)
    table = torch.cat(
        [batch.sample_indices[:, None], batch.sample_ids[:, None], *(tensor.long() for tensor in tensors)],
        dim=1,
    )
    return [tuple(row) for row in table.tolist()]


@pytest.mark.parametrize(
    ("tokens", "length"), [(2, 7), (7, 7), (8, 7), (9, 7), (15, 7), (16, 7), (50, 1), (3, 500)]
)
def test_every_token_but_the_first_is_predicted_once_by_its_predecessor(
    tmp_path: Path, tokens: int, length: int
) -> None:
    samples = PackedSamples(token_file(tmp_path, tokens), length)
    input_ids, labels, _, lengths = samples.read(np.arange(len(samples)), pad_id=0)
    counted = labels != IGNORE_INDEX
    assert (counted == (np.arange(length) < lengths[:, None])).all()
    assert labels[counted].tolist() == list(range(2, tokens + 1))
    assert input_ids[counted].tolist() == list(range(1, tokens))
    assert (input_ids[~counted] == 0).all()
    assert (~counted).sum() < length  # only the last sample is filled up, and not wholly


def test_a_file_without_a_pair_of_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="x holds 1 tokens, fewer than the 2 of a sample; prepare a longer text"
    ):
        PackedSamples(token_file(tmp_path, 1), LENGTH)


def test_what_is_ignored_is_what_the_loss_ignores() -> None:
    assert IGNORE_INDEX == cross_entropy.IGNORE_INDEX


def test_the_batch_is_what_the_pipeline_takes(file: TokenFile) -> None:
    batch = loader(file).step_batch(0, dtype=torch.float64)
    assert isinstance(batch, StepBatch)
    for tensor in (batch.input_ids, batch.labels, batch.position_ids):
        assert (tensor.shape, tensor.dtype) == ((6, LENGTH), torch.int64)
    assert (batch.loss_mask.shape, batch.loss_mask.dtype) == ((6, LENGTH), torch.float64)
    assert loader(file).step_batch(0).loss_mask.dtype == torch.float32
    for tensor in (batch.sample_indices, batch.sample_ids):
        assert (tensor.shape, tensor.dtype) == ((6,), torch.int64)
    assert batch.position_ids.tolist() == [list(range(LENGTH))] * 6
    assert batch.input_ids[:, 0].tolist() == [1 + LENGTH * sample for sample in batch.sample_ids.tolist()]
    assert [piece.input_ids.tolist() for piece in batch.micro_batches(3)] == [
        batch.input_ids[start : start + 2].tolist() for start in (0, 2, 4)
    ]


def test_the_filling_of_the_last_sample_is_masked(file: TokenFile) -> None:
    each = loader(file, b=1, m=72, shuffle=False, pad_id=9)
    batch = each.step_batch(0)
    assert each.samples_per_epoch == 72 == -(-499 // LENGTH)
    assert int((batch.labels != IGNORE_INDEX).sum()) == 499 == int(batch.loss_mask.sum())
    assert batch.loss_mask[-1].tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert batch.input_ids[-1].tolist() == [498, 499, 9, 9, 9, 9, 9]
    assert batch.labels[-1].tolist() == [499, 500] + [IGNORE_INDEX] * 5


@given(
    st.sampled_from([(12, 1, 1), (1, 12, 1), (2, 3, 2), (3, 1, 4), (1, 3, 4), (2, 1, 6), (1, 1, 12)]),
    st.integers(0, 400),
)
def test_any_split_of_a_global_batch_covers_the_same_samples(
    file: TokenFile, split: tuple[int, int, int], consumed: int
) -> None:
    b, m, size = split
    whole = rows(loader(file, b=12, m=1).step_batch(consumed))
    ranks = [rows(loader(file, b, m, rank, size).step_batch(consumed)) for rank in range(size)]
    # Micro batch by micro batch over the ranks, the rows are even in the same order.
    in_order = [row for micro in range(m) for rank in ranks for row in rank[micro * b : micro * b + b]]
    assert in_order == whole


def test_an_epoch_covers_every_sample_and_the_next_begins_within_the_step(file: TokenFile) -> None:
    each = loader(file, b=2, m=5)  # 10 does not divide 72
    seen = Counter[int]()
    for step in range(36):
        seen.update(each.step_batch(step * 10).sample_ids.tolist())
    assert set(seen.values()) == {5} and len(seen) == 72


def test_the_place_of_a_row_is_never_repeated_though_its_sample_is(file: TokenFile) -> None:
    each = loader(file, b=2, m=5)
    places = torch.cat([each.step_batch(step * 10).sample_indices for step in range(36)])
    assert places.tolist() == list(range(360))


@exhibit(
    "torchtitan#811",
    also=("torchtitan#816", "accelerate PR#4071", "Megatron-Bridge PR#4601"),
    subject="checkpoints",
    there="a resumed run began its data again, or saw the end of its last part twice",
    here="the count of samples is the whole state: a resumed run gets the next ones, with another batch too",
    fault=faults.A_RESUME_REPLAYS,
)
def test_the_counter_is_the_whole_state(file: TokenFile) -> None:
    undisturbed = [rows(loader(file).step_batch(step * 6)) for step in range(30)]
    resumed = loader(file)
    for step in (17, 29, 0, 16):
        assert rows(resumed.step_batch(step * 6)) == undisturbed[step]
    # Resumed with half the batch: the same samples go on, in twice the steps.
    smaller = loader(file, b=1)
    assert rows(smaller.step_batch(102)) + rows(smaller.step_batch(105)) == undisturbed[17]


def test_seed_and_shuffle_decide_the_order(file: TokenFile) -> None:
    ids = [loader(file, seed=seed).step_batch(0).sample_ids.tolist() for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]
    assert loader(file, shuffle=False).step_batch(6).sample_ids.tolist() == list(range(6, 12))


def test_steps_for_epochs_see_every_sample(file: TokenFile) -> None:
    each = loader(file, b=2, m=5)
    assert [each.steps_for_epochs(epochs) for epochs in (0.01, 0.5, 1, 2, 2.5)] == [1, 4, 8, 15, 18]
    assert each.global_batch_size == 10
    assert loader(file, 2, 5, 0, 4).global_batch_size == 40


@pytest.mark.parametrize("epochs", [1.0, 1.5])
def test_epochs_end_where_they_end_whatever_the_batch(file: TokenFile, epochs: float) -> None:
    """No sample is counted once more because the last global batch has room for it."""
    counted: Counter[int] = Counter()
    size = 2
    for rank in range(size):
        each = loader(file, m=5, rank=rank, size=size, epochs=epochs)
        assert each.samples_per_epoch % each.global_batch_size, "the last batch must be short for this test"
        for step in range(each.steps_for_epochs(epochs)):
            batch = each.step_batch(step * each.global_batch_size)
            seen = (batch.labels != IGNORE_INDEX).any(dim=1)
            assert torch.equal(batch.loss_mask.bool(), batch.labels != IGNORE_INDEX)
            counted.update(batch.sample_ids[seen].tolist())
    whole, rest = divmod(round(epochs * each.samples_per_epoch), each.samples_per_epoch)
    expected = Counter({whole: each.samples_per_epoch - rest, whole + 1: rest})
    assert Counter(counted.values()) == +expected


def in_documents(folder: Path, documents: list[list[int]]) -> TokenFile:
    prefix = folder / "documents"
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16))
        for ids in documents:
            writer.add(np.array(ids, dtype=np.uint16))
            writer.end_document()
        writer.finish()
        writer.close()
    return TokenFile.open(prefix)


def test_documents_are_numbered_in_a_row_and_positions_begin_anew_with_each(tmp_path: Path) -> None:
    # Cut within the third document; the fourth is empty.
    file = in_documents(tmp_path, [[1, 2, 9], [3, 9], [4, 5, 6, 9], [9], [7, 8, 9]])
    options = {"b": 1, "m": 2, "shuffle": False, "pad_id": 9, "document_mask": True}
    batch = loader(file, **options).step_batch(0)  # type: ignore[arg-type]
    assert batch.input_ids.tolist() == [[1, 2, 9, 3, 9, 4, 5], [6, 9, 9, 7, 8, 9, 9]]
    assert batch.document_ids is not None
    # The last two tokens of the second row are filling, a document of its own.
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 2, 2, 3, 3]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 0, 0, 1, 0, 1]]
    for piece, whole in zip(batch.micro_batches(2), batch.document_ids, strict=True):
        assert piece.document_ids is not None and piece.document_ids.tolist() == [whole.tolist()]
    assert loader(file).step_batch(0).document_ids is None
    # Beyond the end of the data rows count nothing, and are still the documents that they are.
    beyond = loader(file, **options, epochs=0.5).step_batch(0)  # type: ignore[arg-type]
    assert beyond.document_ids is not None and beyond.document_ids.equal(batch.document_ids)
    assert (beyond.labels[1] == IGNORE_INDEX).all()


def test_a_file_whose_documents_do_not_end_is_refused(tmp_path: Path) -> None:
    file = in_documents(tmp_path, [[1, 2, 9], [3, 4], [5, 9]])
    with pytest.raises(DataError, match=r"document 1 ends in id 4, .* is 9; set tokenizer.end_of_document"):
        require_ends(file, 9)
    require_ends(in_documents(tmp_path, [[1, 2, 9], [9], [5, 9]]), 9)


def test_epochs_are_the_decimal_number_that_was_written(tmp_path: Path) -> None:
    """1.1 x 100 samples are 110, though their product in floats is a little more."""
    file = in_documents(tmp_path, [[1] * (100 * LENGTH)])
    each = loader(file, b=1, m=1, epochs=1.1)
    assert each.samples_per_epoch == 100
    assert each.steps_for_epochs(1.1) == 110
    assert [int(each.step_batch(place).loss_mask.any()) for place in (109, 110)] == [1, 0]
