"""Saved in one layout, loaded in another: weights and optimizer state, bit for bit."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.checkpoint.manifest_json import to_json
from megalite.config.sections.toml import shown
from megalite.errors import CheckpointError
from megalite.topology.axes import Layout
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import RopeScaling
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.tiny import tiny_shape
from tests.unit.checkpoint.worlds import KINDS, HeldState, World

LEGAL = [
    Layout(pipeline=pipeline, data=data, tensor=tensor)
    for pipeline in (1, 2, 4)
    for data in (1, 2, 3, 4)
    for tensor in (1, 2, 4, 8)
    if pipeline * data * tensor <= 8
]
partitions = st.none() | st.lists(st.floats(0, 1), min_size=3, max_size=3).map(tuple)


@settings(max_examples=30)
@given(st.booleans(), st.sampled_from(LEGAL), partitions, st.sampled_from(LEGAL), partitions)
def test_any_layout_loads_what_any_layout_saved(
    tied: bool,
    written_by: Layout,
    written_cuts: tuple[float, ...] | None,
    read_by: Layout,
    read_cuts: tuple[float, ...] | None,
) -> None:
    shape = tiny_shape(tied=tied)
    with tempfile.TemporaryDirectory() as folder:
        paths = World(shape, written_by, cuts=written_cuts).save(Path(folder))
        assert paths == [Path(folder) / "step-000100"] * written_by.world_size
        reader = World(shape, read_by, cuts=read_cuts)
        reader.assert_loaded(reader.load(paths[0]))


@exhibit(
    "Megatron-LM PR#5077",
    subject="checkpoints",
    there="moments of the optimizer moved to other weights where its shards were cut anew",
    here="moments are bit for bit those of their weights, however the optimizer's shards are cut",
    fault=faults.MOMENTS_FROM_THE_PARAMETER_S_START,
    case="other shards of the optimizer",
)
@exhibit(
    "DeepSpeed#6503",
    subject="checkpoints",
    there="a checkpoint could not be loaded with another number of tensor-parallel ranks",
    here="any layout loads what any layout saved, bit for bit",
    fault=faults.LOADED_AT_LOCAL_PLACES,
    case="more tensor ranks",
)
@pytest.mark.parametrize(
    ("written_by", "read_by"),
    [(Layout(data=2, tensor=2), Layout(tensor=4)), (Layout(data=3, tensor=2), Layout(data=2))],
    ids=["more tensor ranks", "other shards of the optimizer"],
)
def test_shards_cut_anew_are_those_of_their_weights(
    tmp_path: Path, written_by: Layout, read_by: Layout
) -> None:
    [path, *_] = World(tiny_shape(layers=2), written_by, cuts=(0.31, 0.8)).save(tmp_path)
    reader = World(tiny_shape(layers=2), read_by, cuts=(0.57,))
    reader.assert_loaded(reader.load(path))


@exhibit(
    "nanotron#221",
    subject="checkpoints",
    there="a run with pipeline stages could not resume its optimizer",
    here="stages of any sizes load weights and moments of any others",
    fault=faults.MOMENTS_LEFT_OUT,
)
def test_uneven_stages_load_into_even_ones(tmp_path: Path) -> None:
    shape = tiny_shape()
    [path, *_] = World(shape, Layout(pipeline=2, tensor=2), given=(1, 3)).save(tmp_path)
    reader = World(shape, Layout(pipeline=4))
    reader.assert_loaded(reader.load(path))


@pytest.mark.parametrize("tied", [False, True])
def test_each_element_is_written_once_whatever_the_layout(tmp_path: Path, tied: bool) -> None:
    shape = tiny_shape(tied=tied)
    elements = sum(a * (b[0] if b else 1) for a, *b in canonical_tensors(shape).values())
    for index, layout in enumerate((Layout(), Layout(2, 2, 2), Layout(1, 4, 2))):
        [path, *_] = World(shape, layout, cuts=(0.3, 0.31, 0.9)).save(tmp_path / str(index))
        manifest = read_manifest(path)
        check_coverage(manifest, path)
        data_bytes = sum(manifest.files.values())
        headers = sum(8 + int.from_bytes((path / name).read_bytes()[:8], "little") for name in manifest.files)
        assert data_bytes - headers == 3 * 4 * elements


def test_weights_load_without_the_optimizer(tmp_path: Path) -> None:
    world = World(tiny_shape(), Layout(data=2))
    [path, *_] = world.save(tmp_path)
    for _, _, state, manifest in world.load(path, with_optimizer=False):
        assert state.loaded == {}
        assert manifest.trainer_state == {"step": 100, "samples": 800, "tokens": 9600}
        assert manifest.layout == Layout(data=2)
        assert manifest.config == {"run": {"seed": 1}}


def test_another_model_is_refused_on_all_ranks_with_the_setting_named(tmp_path: Path) -> None:
    shape = tiny_shape()
    [path, *_] = World(shape, Layout()).save(tmp_path)
    others = {
        "vocab_size": replace(shape, vocab_size=100),
        "num_key_value_heads": replace(shape, num_key_value_heads=8),
        "tie_word_embeddings": replace(shape, tie_word_embeddings=True),
        "rope_theta": replace(shape, rope_theta=5e5),
    }
    for setting, other in others.items():
        for outcome in World(other, Layout(tensor=2)).load(path):
            assert isinstance(outcome, CheckpointError)
            assert f"model.{setting}: {shown(getattr(other, setting))} here" in str(outcome)
    longer = World(replace(shape, max_position_embeddings=128), Layout())
    longer.assert_loaded(longer.load(path))


def test_dynamic_ntk_keeps_its_number_of_positions(tmp_path: Path) -> None:
    """Its frequencies follow from max_position_embeddings, which other models may change."""
    dynamic = replace(tiny_shape(), rope_scaling=RopeScaling("dynamic", 2.0))
    [path, *_] = World(dynamic, Layout()).save(tmp_path)
    longer = World(replace(dynamic, max_position_embeddings=2 * dynamic.max_position_embeddings), Layout())
    for outcome in longer.load(path):
        assert isinstance(outcome, CheckpointError) and "model.max_position_embeddings: " in str(outcome)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (KINDS, ("momentum_buffer",)),
        (KINDS, ()),  # as SGD without momentum, which has no state that could miss something
        ((), KINDS),
        (("momentum_buffer",), ()),
    ],
)
def test_another_optimizers_state_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: tuple[str, ...], read: tuple[str, ...]
) -> None:
    world = World(tiny_shape(), Layout(data=2), cuts=(0.0,))  # the first rank's partition is empty
    monkeypatch.setattr("tests.unit.checkpoint.worlds.KINDS", written)
    [path, *_] = world.save(tmp_path)
    monkeypatch.setattr("tests.unit.checkpoint.worlds.KINDS", read)
    [message] = {str(outcome) for outcome in world.load(path)}
    assert f"is {list(written) or 'empty'}, this optimizer's is {list(read) or 'empty'}; set" in message
    assert message.endswith("or start a run from its weights with model.weights = its export")


def test_weights_alone_are_no_run_to_go_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tiny_shape(), Layout())
    monkeypatch.setattr("tests.unit.checkpoint.worlds.KINDS", ())
    monkeypatch.setattr(HeldState, "scalars", lambda self: {})
    [path] = world.save(tmp_path)
    [outcome] = world.load(path)
    assert "holds weights but no optimizer state" in str(outcome) and "model.weights" in str(outcome)
    assert not isinstance(world.load(path, with_optimizer=False)[0], Exception)


def test_only_the_files_that_hold_a_rank_s_part_are_opened(tmp_path: Path) -> None:
    shape = tiny_shape()
    [path, *_] = World(shape, Layout(pipeline=4)).save(tmp_path)
    # Stage 0 of two needs the files of the first two stages of four: the others may be gone.
    for name in ("rank-00002.safetensors", "rank-00003.safetensors"):
        (path / name).unlink()
    first, second = World(shape, Layout(pipeline=2)).load(path)
    assert isinstance(first, CheckpointError) and isinstance(second, CheckpointError)
    assert "rank 1 (pp 1, dp 0, tp 0) could not load" in str(first)
    assert "rank-00002.safetensors" in str(first)


def test_latest_is_the_last_one_saved(tmp_path: Path) -> None:
    world = World(tiny_shape(), Layout(data=2))
    assert find_latest(tmp_path) is None
    for step in (50, 100, 150):
        world.save(tmp_path, step=step)
        assert find_latest(tmp_path) == tmp_path / f"step-{step:06d}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-000050",
        "step-000100",
        "step-000150",
    ]


@exhibit(
    "DeepSpeed#3841",
    also=("DeepSpeed#3607", "transformers#10789"),
    subject="checkpoints",
    there="weights that are divided over ranks were saved in part, or empty, and nobody said so",
    here="a checkpoint that lacks an element is not published, and the tensor is named",
    fault=faults.PUBLISHED_WITH_HOLES,
)
def test_state_that_no_rank_owns_is_found_before_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tiny_shape(), Layout(data=2), cuts=(0.5,))
    world.save(tmp_path, step=50)
    complete = HeldState.shards
    monkeypatch.setattr(HeldState, "shards", lambda self: list(complete(self))[:-1])
    [message] = {str(outcome) for outcome in world.save(tmp_path)}
    assert "rank 0 (pp 0, dp 0, tp 0) could not publish" in message
    assert "exp_avg_sq of lm_head.weight is missing" in message
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-000050"}


def test_a_checkpoint_with_a_hole_is_not_loaded(tmp_path: Path) -> None:
    world = World(tiny_shape(), Layout())
    [path, *_] = world.save(tmp_path)
    manifest = read_manifest(path)
    name = "model.layers.2.mlp.up_proj.weight"
    weights = {**manifest.tensors["weight"]}
    for entry, fault in (
        (replace(weights[name], shards=()), f"weight of {name}: element [0, 0] of [76, 48] is missing"),
        (None, f"weight of {name} is missing"),
    ):
        changed = {**weights, name: entry} if entry else {key: weights[key] for key in weights if key != name}
        holed = replace(manifest, tensors={**manifest.tensors, "weight": changed})
        (path / "manifest.json").write_text(to_json(holed))
        [outcome] = world.load(path)
        assert fault in str(outcome)
