"""The mean of checkpoints, as an export takes it: right to the last digit of float32, or refused by name."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megalite.checkpoint import reader as checkpoint_reader
from megalite.checkpoint.folder import checkpoints_of, last_checkpoints
from megalite.checkpoint.regions import full_slice
from megalite.checkpoint.tensor_header import read_header
from megalite.cli import convert
from megalite.config.sections.schema import OptimizerConfig
from megalite.convert.average import AveragedWeights
from megalite.errors import CheckpointError
from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.optimizer.torch import TorchOptimizer
from tests.support.parity import ROUNDED_RTOL, assert_close
from tests.support.tiny import tiny_shape
from tests.unit.checkpoint.worlds import World, truth
from tests.unit.convert.exporting import lively_stage, save_stage

SHAPE = tiny_shape(layers=2)
LAYOUTS = (Layout(2, 2, 1), Layout(tensor=4), Layout(data=2))
"""The layouts of the checkpoints of steps 100, 110 and 120."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of a run whose layout changed."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for version, layout in enumerate(LAYOUTS):
        World(SHAPE, layout, cuts=(0.37,)).save(folder, step=100 + 10 * version, version=version)
    return folder


def mean_of(name: str, versions: range) -> torch.Tensor:
    found = [truth(SHAPE, "weight", name, version=version).double() for version in versions]
    return torch.stack(found).mean(0).float()


@pytest.mark.parametrize("block_elements", [1, 500, 4 << 20])
def test_a_mean_is_exact_whatever_layouts_wrote_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block_elements: int
) -> None:
    monkeypatch.setattr(checkpoint_reader, "BLOCK_ELEMENTS", block_elements)
    with AveragedWeights(last_checkpoints(folder, 3)) as reader:
        assert reader.steps == (100, 110, 120) and reader.manifest.step == 120
        for name, shape in canonical_tensors(SHAPE).items():
            expected = mean_of(name, range(3))
            assert torch.equal(reader.read("weight", name, full_slice(shape)), expected), name
            blocks = list(reader.blocks("weight", name))
            assert torch.equal(torch.cat(blocks), expected), name
            assert max(block.numel() for block in blocks) <= max(block_elements, *shape[1:], 1)


def test_a_flipped_bit_is_found_where_blocks_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_reader, "BLOCK_ELEMENTS", 500)
    checkpoint = Path(shutil.copytree(folder / "step-000110", tmp_path / "step-000110"))
    with AveragedWeights([checkpoint]) as reader:
        name = "model.layers.1.mlp.down_proj.weight"
        [*_, shard] = reader.manifest.tensors["weight"][name].shards
        place = read_header(checkpoint / shard.file)[shard.key]
        content = bytearray((checkpoint / shard.file).read_bytes())
        content[place.stop - 1] ^= 0x10
        (checkpoint / shard.file).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{shard.file}: the bytes of {name} are not those"):
            list(reader.blocks("weight", name))


def test_checkpoints_are_chosen_by_number_or_step(folder: Path) -> None:
    steps = {step: folder / f"step-{step:06d}" for step in (100, 110, 120)}
    assert last_checkpoints(folder, 2) == [steps[120], steps[110]]
    assert last_checkpoints(steps[110], 2) == [steps[110], steps[100]]
    assert checkpoints_of(folder.parent, [100, 120]) == [steps[100], steps[120]]


def test_too_few_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="has 3 checkpoints up to step-000120, not 4; average at most 3"
    ):
        last_checkpoints(folder, 4)
    with pytest.raises(
        CheckpointError, match="no checkpoint of step 105, 130; it has those of 100, 110, 120"
    ):
        checkpoints_of(folder, [100, 105, 130])
    copy = Path(shutil.copytree(folder, tmp_path / "checkpoints"))
    (copy / "step-000100" / "rank-00000.safetensors").unlink()
    for choose in (lambda: last_checkpoints(copy, 3), lambda: checkpoints_of(copy, [100, 120])):
        with pytest.raises(CheckpointError, match=r"step-000100/rank-00000\.safetensors is missing"):
            choose()


def test_what_has_no_mean_is_refused(folder: Path, tmp_path: Path) -> None:
    other = replace(SHAPE, rope_theta=5e5, intermediate_size=SHAPE.intermediate_size + 4)
    [foreign] = World(other, Layout()).save(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        AveragedWeights([foreign, folder / "step-000120"])
    assert f"model.intermediate_size is {other.intermediate_size} and {SHAPE.intermediate_size}" in str(
        refused.value
    )
    assert "model.rope_theta is 500000.0 and 10000.0" in str(refused.value)
    with pytest.raises(CheckpointError, match="step-000120 is named twice"):
        AveragedWeights([folder / "step-000120", folder / "." / "step-000120"])
    with pytest.raises(CheckpointError, match="step-000110 has no master; it has weight"):
        AveragedWeights([folder / "step-000110", folder / "step-000120"], "master")


def bf16_run(run: Path, shape: ModelShape, steps: int) -> None:
    """Each step's checkpoint of a run with float32 masters."""
    split, mesh = pipeline_split(shape.num_hidden_layers), ParallelMesh.single()
    replica = build_replica(shape, mesh, split, ModelOptions(dtype=torch.bfloat16), seed=3)
    settings = OptimizerSettings(OptimizerConfig(name="sgd", weight_decay=0.0, gradient_clipping=0.0))
    optimizer = TorchOptimizer(replica, settings)
    for step in range(1, steps + 1):
        for tensor in replica.stage.parameters():
            tensor.grad = torch.full_like(tensor, 1e-3 * step, dtype=torch.float32)
        optimizer.step(1.0, float(optimizer.squared_norm()))
        save_stage(run, shape, replica.stage, step=step, optimizer=optimizer.state)


def test_the_mean_of_a_bf16_run_is_that_of_its_masters(tmp_path: Path) -> None:
    shape = replace(SHAPE, tie_word_embeddings=True)
    bf16_run(tmp_path, shape, 3)
    name = "model.layers.1.mlp.up_proj.weight"
    with AveragedWeights(last_checkpoints(tmp_path, 3)) as reader:
        assert reader.described(torch.float32) == "float32, from the checkpoint's master"
        mean = reader.read("weight", name, full_slice(canonical_tensors(shape)[name]))
    means = {"weight": torch.zeros(()).double(), "master": torch.zeros(()).double()}
    for each in last_checkpoints(tmp_path, 3):
        for kind in means:
            with AveragedWeights([each], kind) as reader:
                means[kind] = means[kind] + reader.read("weight", name, full_slice(mean.shape)).double() / 3
    assert_close(mean, means["master"], rtol=ROUNDED_RTOL)
    assert not torch.equal(mean, means["weight"].float())


def test_an_export_of_a_mean_is_compared_and_names_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    shape = replace(SHAPE, tie_word_embeddings=True)
    stages = [lively_stage(shape, scale=scale) for scale in (3.0, 4.0, 5.0)]
    for step, stage in zip((10, 20, 30), stages, strict=True):
        save_stage(tmp_path, shape, stage, step=step)
    assert convert.run(["export", str(tmp_path), str(tmp_path / "last"), "--average", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "from the average of " in said and "step-000030, " in said and "whole model, logits" in said
    assert "| weights | the average of steps 20, 30 |" in (tmp_path / "last" / "README.md").read_text()
    steps = ["export", str(tmp_path), str(tmp_path / "steps"), "--steps", "10,30"]
    assert convert.run(steps) == 0
    folders = [str(tmp_path / "checkpoints" / f"step-{step:06d}") for step in (30, 10)]
    assert convert.run(["export", *folders, str(tmp_path / "named"), "--dtype", "bfloat16"]) == 0
    exported = {name: load_file(tmp_path / name / "model.safetensors") for name in ("last", "steps", "named")}
    parameters = [dict(stage.named_parameters()) for stage in stages]
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        first, second, third = (found[name].detach().double() for found in parameters)
        assert torch.equal(exported["last"][name], ((second + third) / 2).float())
        assert torch.equal(exported["steps"][name], ((first + third) / 2).float())
        assert torch.equal(exported["named"][name], ((first + third) / 2).float().bfloat16())
    with pytest.raises(CheckpointError, match="--average and --steps take one run folder"):
        convert.run(["export", *folders, str(tmp_path / "none"), "--average", "2"])


@pytest.mark.parametrize(
    "arguments", [["--average", "0"], ["--steps", "10,x"], ["--average", "2", "--steps", "1"]]
)
def test_wrong_words_for_a_mean_are_refused(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        convert.run(["export", "run", "out", *arguments])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert any(
        each in said
        for each in ("not a whole number of 1 or more", "is not a list of steps", "not allowed with")
    )
