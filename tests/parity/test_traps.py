"""Seven mistakes of published guides, run as docs/learn/traps.md has them, and megalite on the same input."""

import contextlib
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.config.load import load_run
from megalite.config.sections.schema import OptimizerConfig
from megalite.data.batches.blend import SampleOrder
from megalite.data.batches.loader import BatchShare, StepLoader
from megalite.data.batches.packing import IGNORE_INDEX
from megalite.data.files.token_file import TokenFile, TokenWriter, bin_path, idx_path
from megalite.errors import ConfigError
from megalite.model.replica import Replica
from megalite.model.stages import build_replica
from megalite.parallel.cross_entropy import LossTerms, VocabularyShard, vocab_parallel_cross_entropy
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.parallel.objective import NEXT_TOKEN
from megalite.parallel.pipeline import PipelineRunner
from megalite.parallel.step_batch import StepBatch
from megalite.topology.adapter import Lora
from megalite.topology.parameters import canonical_tensors, stage_parameters
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from megalite.train.assemble import StepSchedule, TrainingPlan, assemble
from megalite.train.optimizer.protocol import Optimizer
from megalite.train.optimizer.settings import OptimizerSettings
from tests.support.documents import README, blocks
from tests.support.jobs import ROOT
from tests.support.options import NO_RECOMPUTE, Recompute, options_of
from tests.support.parity import FLOAT32_RTOL, assert_close, assert_same_tensors
from tests.support.tiny import tiny_batch, tiny_shape
from tests.support.training import start_adapter, whole_loss

PAGE = ROOT / "docs" / "learn" / "traps.md"
ALONE = ParallelMesh.single()
GUIDE_JSON = ROOT / "examples" / "traps" / "ds_config.json"


@dataclass(frozen=True)
class Trap:
    """A program of the page after it has run: its variables, what it printed, and what the page shows of it."""

    variables: dict[str, Any]
    printed: str
    shown: str

    def __getitem__(self, name: str) -> Any:
        return self.variables[name]


def run_trap(program: str, shown: str) -> Trap:
    variables: dict[str, Any] = {}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(program, PAGE.name, "exec"), variables)
    # DeepSpeed's own log lines begin with a date.
    lines = [line for line in output.getvalue().splitlines(keepends=True) if not line.startswith("[20")]
    return Trap(variables, "".join(lines), shown)


@pytest.fixture(scope="module")
def traps() -> list[Trap]:
    text = PAGE.read_text(encoding="utf-8")
    pairs = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(pairs) == len(blocks(PAGE, "python")) == len(re.findall("^## ", text, re.MULTILINE)) == 7
    return [run_trap(program, shown) for program, shown in pairs]


def test_each_program_prints_what_the_page_shows(traps: list[Trap]) -> None:
    assert [trap.printed for trap in traps] == [trap.shown for trap in traps]


def token_file(folder: Path, ids: Sequence[int]) -> TokenFile:
    """One document."""
    prefix = folder / "x"
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16))
        writer.add(np.array(ids, dtype=np.uint16))
        writer.end_document()
        writer.finish()
        writer.close()
    return TokenFile.open(prefix)


def assembled(
    micro_batches: int = 1, *, recompute: Recompute = NO_RECOMPUTE, dtype: torch.dtype = torch.float64
) -> tuple[Replica, Optimizer, PipelineRunner]:
    """A tiny model in one process, with the wiring of a run."""
    shape = tiny_shape()
    settings = OptimizerSettings(OptimizerConfig(name="adamw"))
    options = options_of(dtype, recompute=recompute)
    schedule = StepSchedule(micro_batches=micro_batches)
    plan = TrainingPlan(shape, pipeline_split(shape.num_hidden_layers), options, settings, schedule)
    return assemble(plan, ALONE, seed=7)


def gradients(replica: Replica) -> dict[str, Tensor]:
    """A copy of each gradient; a parameter without one fails."""
    found = {name: tensor.grad for name, tensor in replica.trained_tensors.items()}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def logits(replica: Replica, batch: StepBatch) -> Tensor:
    chunk = replica.stage.whole
    with torch.no_grad():
        return chunk.logits(chunk.normed(chunk.decode(batch.input_ids, batch.position_ids)))


def test_labels_are_shifted_once(traps: list[Trap], tmp_path: Path) -> None:
    trap = traps[0]
    text = trap["text"]
    following = trap["model"](text).argmax(dim=-1)
    # The guide's model is certain of the token after the next one.
    assert torch.equal(following, (text + 2) % 8) and 10 * trap["loss"] < math.log(8)

    loader = StepLoader(token_file(tmp_path, text.tolist()), BatchShare(64, 1, 1), SampleOrder(seed=5))
    batch = loader.step_batch(0)
    replica, optimizer, pipeline = assembled(dtype=torch.float32)
    for _ in range(40):
        whole_loss(pipeline, batch, ALONE)
        optimizer.reduce_gradients()
        optimizer.step(0.003, float(optimizer.squared_norm()))
    assert torch.equal(logits(replica, batch)[0].argmax(dim=-1), text[1:])


def test_the_last_step_of_an_epoch_trains_what_is_left(traps: list[Trap], tmp_path: Path) -> None:
    trap = traps[1]
    assert torch.equal(trap["eight"].weight, trap["ten"].weight)
    assert trap["eight"].weight.grad is None and trap["ten"].weight.grad.abs().max() > 0

    # Ten samples, four micro batches a step.
    file = token_file(tmp_path, [number % 100 + 1 for number in range(10 * 8 + 1)])
    loader = StepLoader(file, BatchShare(8, 1, 4), SampleOrder(seed=5, epochs=1))
    steps = [loader.step_batch(4 * step) for step in range(loader.steps_for_epochs(1))]
    trained = [
        sample
        for batch in steps
        for sample, labels in zip(batch.sample_ids.tolist(), batch.labels, strict=True)
        if (labels != IGNORE_INDEX).all()
    ]
    assert len(steps) == 3 and sorted(trained) == list(range(10))
    # The last update is that of two samples, with their full weight.
    replica, _, pipeline = assembled(4)
    last = replace(steps[-1], loss_mask=steps[-1].loss_mask.double())
    loss, gradient = whole_loss(pipeline, last, ALONE), gradients(replica)
    assert all(each.abs().max() > 0 for each in gradient.values())
    alone, _, two = assembled(2)
    assert_close(loss, whole_loss(two, last.map(lambda tensor: tensor[:2]), ALONE))
    assert_same_tensors(gradient, gradients(alone))


def test_a_batch_for_four_ranks_is_refused_on_others(traps: list[Trap], tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    # Without its first key the guide's file means another batch on every number of ranks, and nobody is told.
    guide = traps[2]["guide"]
    assert DeepSpeedConfig(guide).train_batch_size == 16
    whole = json.loads(GUIDE_JSON.read_text())
    assert guide | {"train_batch_size": 64} == {name: whole[name] for name in [*guide, "train_batch_size"]}

    run_file, short = tmp_path / "run.toml", tmp_path / "short.json"
    [text] = blocks(README, "toml")
    run_file.write_text(text)
    short.write_text(json.dumps(guide))

    def accepted(file: Path, ranks: int) -> bool:
        flags = ["--training.global_batch_size", "64", "--deepspeed.config", str(file)]
        try:
            config = load_run(run_file, [*flags, "--parallel.data", str(ranks)]).config
        except ConfigError as error:
            assert f"data {ranks} (--parallel.data)" in str(error)
            return False
        assert config.batch.global_batch_size == 64
        return True

    for file in (GUIDE_JSON, short):
        assert [ranks for ranks in (1, 2, 4, 8) if accepted(file, ranks)] == [4]
    automatic = ROOT / "examples" / "quickstart" / "ds_config.json"
    assert all(accepted(automatic, ranks) for ranks in (1, 2, 4, 8))


def test_no_layer_is_lost_in_a_pipeline(traps: list[Trap]) -> None:
    trap = traps[3]
    assert trap["dropped"] == [28, 29]

    layers, stages = len(trap["layers"]), trap["stages"]
    split = pipeline_split(layers, stages)
    assert [len(split.layers_of(stage)) for stage in range(stages)] == [7, 8, 8, 7]
    shape = tiny_shape(layers=layers)
    names = [
        part.name
        for stage in range(stages)
        for parameter in stage_parameters(shape, split, stage)
        for part in parameter.spec.parts
    ]
    # Every tensor of every layer, on one stage each.
    assert sorted(names) == sorted(canonical_tensors(shape))
    with pytest.raises(ValueError, match="are not a split of 30 layers over 4 chunks"):
        pipeline_split(layers, stages, layers_per_chunk=[trap["per_stage"]] * stages)


def test_recompute_keeps_the_trained_layers(traps: list[Trap]) -> None:
    trap = traps[4]
    assert trap["after"] > 100 * trap["before"]
    assert id(trap["model"][0].layer.weight) not in trap["trained"]

    batch = tiny_batch(tiny_shape(), 2)
    plain, _, pipeline = assembled()
    recomputed, _, with_recompute = assembled(recompute=Recompute("full", ratio=0.5))
    batch = replace(batch, loss_mask=batch.loss_mask.double())
    assert torch.equal(whole_loss(pipeline, batch, ALONE), whole_loss(with_recompute, batch, ALONE))
    assert_same_tensors(recomputed.tensors, plain.tensors, rtol=0)
    assert_same_tensors(gradients(recomputed), gradients(plain), rtol=0)


def test_an_adapter_begins_at_the_base_model(traps: list[Trap]) -> None:
    trap = traps[5]
    # The last factor of the program is the right one.
    assert torch.equal(trap["adapted"], trap["base"](trap["x"]))
    random = trap["base"](trap["x"]) + trap["scale"] * trap["x"] @ trap["A"].T @ torch.randn(16, 64)
    assert (random - trap["adapted"]).norm() > 10 * trap["adapted"].norm()

    def replica(shape: ModelShape) -> Replica:
        return build_replica(shape, ALONE, pipeline_split(shape.num_hidden_layers), seed=7)

    batch, shape = tiny_batch(tiny_shape(), 2), tiny_shape()
    adapted = replica(replace(shape, adapter=Lora(16, 16, ("q_proj", "v_proj", "down_proj"))))
    base = logits(replica(shape), batch)
    assert any(".lora.A" in name and tensor.abs().max() > 0 for name, tensor in adapted.tensors.items())
    assert torch.equal(logits(adapted, batch), base)
    start_adapter(adapted, seed=7)
    assert not torch.equal(logits(adapted, batch), base)


def test_a_loss_is_a_mean_over_tokens(traps: list[Trap]) -> None:
    trap = traps[6]
    assert trap["mean_of_means"] > 3 * trap["per_token"]

    texts, length = trap["labels"].shape
    positions = torch.arange(length).repeat(texts, 1)
    mask = torch.ones(texts, length, dtype=torch.float64)
    batch = StepBatch(trap["labels"].clamp(min=0), positions, trap["labels"], mask, torch.arange(texts))
    weighted = NEXT_TOKEN.weighted(batch, NEXT_TOKEN.weight(batch).reciprocal())
    shard = VocabularyShard(range(8), RankGroup((0,), 0))
    losses = [
        NEXT_TOKEN.loss(
            vocab_parallel_cross_entropy(
                values.clone()[None], micro_batch.labels, micro_batch.loss_mask, shard, LossTerms(8)
            ).sum(dim=-1),
            micro_batch,
        )
        for values, micro_batch in zip(trap["logits"], weighted.micro_batches(texts), strict=True)
    ]
    assert_close(sum(losses), trap["per_token"], rtol=FLOAT32_RTOL)
