"""The manifest: what it refuses, by name."""

import gc
import hashlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.checkpoint import coverage
from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.folder import read_manifest
from megalite.checkpoint.manifest import Manifest, PackedShards, Shard, Stream, TensorEntry
from megalite.checkpoint.manifest_json import from_json, to_json
from megalite.errors import CheckpointError
from megalite.topology.axes import Layout
from megalite.topology.experts import MixtureShape
from megalite.topology.parameters import canonical_tensors
from megalite.topology.sharding import TensorSlice
from megalite.topology.stages import balanced_split
from tests.support.counting import python_calls
from tests.support.tiny import MIXTURE_SHAPES, tiny_shape

SHAPE = tiny_shape(layers=1)
NAME = "model.layers.0.self_attn.q_proj.weight"
SOURCE = Path("checkpoint")


def shard(offsets: tuple[int, ...], shape: tuple[int, ...], flat: tuple[int, int] | None = None) -> Shard:
    return Shard("rank-00000.safetensors", "key", offsets, shape, flat, "0" * 64)


def whole(shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(shape, "float32", (shard((0,) * len(shape), shape),))


def manifest(kinds: tuple[str, ...] = ("weight", "exp_avg"), **changed: TensorEntry | None) -> Manifest:
    """A manifest of the tiny model; `changed` replaces the entry of NAME for a kind, None removes it."""
    tensors = {
        kind: {name: whole(shape) for name, shape in canonical_tensors(SHAPE).items()} for kind in kinds
    }
    for kind, entry in changed.items():
        if entry is None:
            del tensors[kind][NAME]
        else:
            tensors[kind][NAME] = entry
    return Manifest(
        megalite="0",
        torch="2",
        trainer_state={"step": 3, "samples": 24, "tokens": 288},
        layout=Layout(2, 1, 2),
        stage_layers=((0,), (1, 2)),
        model=SHAPE,
        config={"optimizer": {"eps": 1e-8, "betas": [0.9, 0.95]}},
        optimizer={"step": 3.0},
        tensors=tensors,
        files={"rank-00000.safetensors": 12},
    )


def test_a_manifest_survives_its_text() -> None:
    written = manifest(exp_avg=TensorEntry((48, 48), "float32", (shard((0, 0), (24, 48), (3, 70)),)))
    written = replace(written, stream=Stream((("a.jsonl", 900),), ((0, 0, 12, 3, 5), (1, 0, 450, 0, 0))))
    assert from_json([to_json(written)], SOURCE) == written
    assert written.step == 3 and written.optimizer_state_keys == {"exp_avg"}


def test_a_whole_manifest_is_covered() -> None:
    check_coverage(manifest(), SOURCE)


def entry(*shards: Shard, shape: tuple[int, ...] = (48, 48)) -> TensorEntry:
    return TensorEntry(shape, "float32", shards)


FAULTS = {
    "a tensor without a kind": ({"exp_avg": None}, f"exp_avg of {NAME} is missing"),
    "a weight that is missing": ({"weight": None}, f"weight of {NAME} is missing"),
    "half a tensor": ({"weight": entry(shard((0, 0), (24, 48)))}, f"{NAME}: element [24, 0] of [48, 48] is missing"),
    "a region twice": (
        {"weight": entry(shard((0, 0), (48, 48)), shard((0, 0), (48, 48)))},
        "elements 0 to 2304 of region [0:48, 0:48] are covered twice",
    ),
    "overlapping regions": (
        {"weight": entry(shard((0, 0), (30, 48)), shard((24, 0), (24, 48)))},
        "element [24, 0] of [48, 48] is stored more than once",
    ),
    "a gap between runs": (
        {"exp_avg": entry(shard((0, 0), (48, 48), (0, 100)), shard((0, 0), (48, 48), (101, 2304)))},
        "elements 100 to 101 of region [0:48, 0:48] are missing",
    ),
    "overlapping runs": (
        {"exp_avg": entry(shard((0, 0), (48, 48), (0, 100)), shard((0, 0), (48, 48), (99, 2304)))},
        "elements 99 to 100 of region [0:48, 0:48] are covered twice",
    ),
    "a run cut short": ({"exp_avg": entry(shard((0, 0), (48, 48), (0, 100)))}, "elements 100 to 2304 of region"),
    "a region outside": ({"weight": entry(shard((24, 0), (48, 48)))}, "region [24:72, 0:48] lies outside [48, 48]"),
    "a padded size": ({"weight": entry(shard((0, 0), (64, 48)), shape=(64, 48))}, "[64, 48], but the model's"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_there_exactly_once_is_named(fault: str) -> None:
    changed, message = FAULTS[fault]
    with pytest.raises(CheckpointError) as caught:
        check_coverage(manifest(**changed), SOURCE)
    assert message in str(caught.value)


def test_a_tensor_that_the_model_does_not_have_is_named() -> None:
    plain = manifest()
    plain.tensors["weight"]["model.layers.7.bias"] = whole((3,))  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"weight of model\.layers\.7\.bias belongs to no tensor"):
        check_coverage(plain, SOURCE)


@settings(max_examples=60)
@given(st.data(), st.integers(1, 5), st.sampled_from([0, 1]))
def test_a_tensor_is_covered_exactly_when_no_shard_is_lost(data: st.DataObject, tp: int, dim: int) -> None:
    shards = []
    for part in balanced_split(48, tp):
        region_shape = (len(part), 48) if dim == 0 else (48, len(part))
        offsets = (part.start, 0) if dim == 0 else (0, part.start)
        total = len(part) * 48
        cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=3)))
        bounds = [0, *cuts, total]
        runs = list(pairwise(bounds))
        shards += [shard(offsets, region_shape, run if len(runs) > 1 else None) for run in runs]
    shuffled = data.draw(st.permutations(shards))
    check_coverage(manifest(exp_avg=entry(*shuffled)), SOURCE)
    with pytest.raises(CheckpointError, match=NAME):
        check_coverage(manifest(exp_avg=entry(*shuffled[1:])), SOURCE)
    with pytest.raises(CheckpointError, match=NAME):
        check_coverage(manifest(exp_avg=entry(*shuffled, shuffled[0])), SOURCE)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "not a complete manifest"),
        (lambda text: text.replace('"step":3,', '"step":4,'), "does not match its own hash"),
        (lambda text: text.replace('"format":1', '"format":9'), "format 9 is not 1"),
        (lambda text: "[]", "not a complete manifest"),
    ],
)
def test_a_damaged_manifest_is_refused(damage: Callable[[str], str], message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(damage(to_json(manifest())))
    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path)


def test_an_unknown_field_is_refused() -> None:
    content = json.loads(to_json(manifest()))["manifest"]
    text = to_json(replace(manifest(), optimizer={"step": 3.0}))
    assert from_json([text], SOURCE).optimizer == {"step": 3.0}
    content["model"]["mystery"] = 1
    text = json.dumps(content, separators=(",", ":"))
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    with pytest.raises(CheckpointError, match="mystery"):
        from_json([f'{{"manifest":{text},"sha256":"{sha256}"}}'], SOURCE)


@pytest.mark.parametrize("name", MIXTURE_SHAPES)
def test_a_mixture_survives_the_text_of_its_manifest(name: str) -> None:
    whole_manifest = replace(manifest(), model=MIXTURE_SHAPES[name])
    read = from_json(to_json(whole_manifest).splitlines(keepends=True), SOURCE).model
    assert type(read) is MixtureShape and read == MIXTURE_SHAPES[name]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 2**40),
        ("num_experts", True),
        ("num_experts_per_tok", 6),
        ("n_group", 0),
        ("n_group", 2),
        ("topk_group", 2),
        ("decoder_sparse_step", 0),
        ("mlp_only_layers", ["first"]),
        ("router_scores", "tanh"),
    ],
)
def test_experts_of_a_manifest_that_are_none_are_refused(field: str, value: object) -> None:
    content = json.loads(to_json(replace(manifest(), model=MIXTURE_SHAPES["olmoe"])))["manifest"]
    content["model"]["experts"][field] = value
    text = json.dumps(content, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    with pytest.raises(CheckpointError, match="a field is missing, unknown or of the wrong type"):
        from_json([f'{{"manifest":{text},"sha256":"{digest}"}}'], SOURCE)


def test_a_manifest_of_one_line_is_read_as_one_of_many() -> None:
    written = manifest()
    text = to_json(written)
    content = json.dumps(json.loads(text)["manifest"], separators=(",", ":"))
    one_line = f'{{"manifest":{content},"sha256":"{hashlib.sha256(content.encode()).hexdigest()}"}}\n'
    assert len(text.splitlines()) > len(one_line.splitlines()) == 1
    assert from_json([one_line], SOURCE) == from_json(text.splitlines(keepends=True), SOURCE) == written


@pytest.mark.parametrize("change", ['"dtype":"float32"', "rank-00000", '"packed":'])
def test_an_altered_line_of_a_manifest_is_refused(change: str, tmp_path: Path) -> None:
    lines = to_json(manifest()).splitlines(keepends=True)
    place = next(place for place, line in enumerate(lines) if line.startswith('{"shape"'))
    other = {'"dtype":"float32"': '"dtype":"float64"', "rank-00000": "rank-00001"}
    lines[place] = lines[place].replace(change, other[change]) if change in other else '{"packed":7}\n'
    (tmp_path / "manifest.json").write_text("".join(lines))
    with pytest.raises(CheckpointError, match="does not match its own hash"):
        read_manifest(tmp_path)


def test_reading_a_manifest_takes_less_memory_than_its_text(tmp_path: Path) -> None:
    shards = [replace(shard, file="rank-00000.safetensors") for shard in _shards(400)]
    whole = replace(
        manifest(), tensors={"weight": {f"layer-{number}": entry(*shards) for number in range(24)}}
    )
    (tmp_path / "manifest.json").write_text(to_json(whole))
    tracemalloc.start()
    try:
        read_manifest(tmp_path)
        highest = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert highest < (tmp_path / "manifest.json").stat().st_size


@settings(max_examples=200)
@given(st.data())
def test_boxes_tile_a_tensor_exactly_when_each_element_is_in_one(data: st.DataObject) -> None:
    rows, columns = 3, 4

    def span(size: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: (min(ends), max(ends)))

    drawn = data.draw(st.lists(st.tuples(span(rows), span(columns)), max_size=6))
    elements = [(row, column) for row in range(rows) for column in range(columns)]
    counts = {
        at: sum(top <= at[0] < bottom and left <= at[1] < right for (top, bottom), (left, right) in drawn)
        for at in elements
    }
    # Fill the gaps between the drawn boxes, so that complete tilings are frequent.
    if data.draw(st.booleans()):
        drawn += [((row, row + 1), (col, col + 1)) for (row, col), count in counts.items() if not count]
        counts = {at: max(count, 1) for at, count in counts.items()}
    boxes = [TensorSlice((top, left), (bottom - top, right - left)) for (top, bottom), (left, right) in drawn]
    problem = coverage._tiling_problem(boxes, (rows, columns))
    first = next((at for at in elements if counts[at] != 1), None)
    if first is None:
        assert problem is None
    else:
        fault = "stored more than once" if counts[first] else "missing"
        assert problem == f"element {list(first)} of [3, 4] is {fault}"


def test_the_check_of_a_hostile_manifest_is_linear_in_its_boxes() -> None:
    """Python calls: with each pair of boxes compared, four times the boxes took sixteen times as many."""

    def strips(per_row: int) -> Manifest:
        width = 48 // per_row
        boxes = [shard((row, width * at), (1, width)) for row in range(48) for at in range(per_row)]
        return manifest(weight=entry(*boxes))

    few, many = strips(4), strips(16)
    calls = [python_calls(partial(check_coverage, each, SOURCE)) for each in (manifest(), few, many)]
    assert calls[2] - calls[0] <= 4.5 * (calls[1] - calls[0])


@pytest.mark.parametrize(
    "stream",
    [
        Stream((("a.jsonl", -1),), ()),
        Stream((("a.jsonl", 900),), ((0, 0, 12, 3),)),
        Stream((("a.jsonl", 900),), ((0, 0, 12, 3, 1.5),)),  # type: ignore[arg-type]
    ],
    ids=["a negative size", "a lane without a token", "half a token"],
)
def test_a_position_in_streamed_text_that_is_none_is_refused(stream: Stream) -> None:
    with pytest.raises(CheckpointError, match="stream"):
        from_json([to_json(replace(manifest(), stream=stream))], SOURCE)


def _shards(count: int) -> list[Shard]:
    return [
        Shard(
            f"rank-{place % 7:05d}.safetensors",
            f"weight/a@{place}",
            (0, 0),
            (count, 8),
            (place, place + 1),
            f"{place:064x}",
        )
        for place in range(count)
    ]


def test_packed_shards_are_those_that_were_packed_whatever_their_keys_and_hashes() -> None:
    shards = _shards(5)
    odd = [replace(shards[0], key="weight/b"), replace(shards[1], sha256="AB"), replace(shards[2], flat=None)]
    odd += [replace(shards[3], key=""), replace(shards[4], sha256="")]
    packed = PackedShards([*shards, *odd])
    assert packed == (*shards, *odd) and list(packed[4:6]) == [shards[4], odd[0]] and packed[-1] == odd[-1]
    assert packed != shards and hash(packed) == hash((*shards, *odd))


def test_a_packed_shard_takes_less_than_150_bytes() -> None:
    """Rank 0 of 131,072 ranks has half a million."""
    tracemalloc.start()
    packed = PackedShards(iter(_shards(5000)))
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(packed) < 150
