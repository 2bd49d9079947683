"""From DeepSpeed's engine through a universal checkpoint into another layout, and back: losses and moments agree."""

import json
import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import cross_entropy

from megalite.checkpoint.reader import CheckpointReader
from megalite.cli import convert
from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.huggingface.export import read_family_tensor
from megalite.data.batches.loader import StepLoader
from megalite.families.registry import family_tensors, hf_config
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.step_batch import StepBatch
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.train.step.train_step import TrainStep
from tests.support.checkpoint_pairs import save
from tests.support.matrix.axes import BASE, Settings
from tests.support.matrix.rows import config_of
from tests.support.parity import ENGINE_RTOL, about
from tests.support.ranks import RankPool
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import rows_of

SEQUENCES, LENGTH = 8, 12
SAVED, MOVED, END = 3, 6, 8
ADAMW = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True}
OURS: Settings = {
    **BASE,
    "training.steps": END,
    "training.precision": "fp32",
    "training.micro_batches": 4,
    "training.micro_batch_size": 2,
    "optimizer.name": "adamw",
    "optimizer.learning_rate": ADAMW["lr"],
    "optimizer.gradient_clipping": 0.5,
    # Theirs decays norms and biases too.
    "optimizer.groups": [{"pattern": "*", "weight_decay": ADAMW["weight_decay"]}],
}


def batch_of(step: int, shape: ModelShape) -> StepBatch:
    """The same rows for both, whose tokens all count alike."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(shape.vocab_size, (SEQUENCES, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).repeat(SEQUENCES, 1)
    samples = torch.arange(SEQUENCES) + step * SEQUENCES
    ones = torch.ones(SEQUENCES, LENGTH)
    return StepBatch(ids[:, :-1].contiguous(), positions, ids[:, 1:].contiguous(), ones, samples)


@dataclass(frozen=True)
class StepsOfBoth:
    """In a StepLoader's place: an imported run goes on with their data, of which it knows the position."""

    mesh: ParallelMesh
    shape: ModelShape

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype) -> StepBatch:
        return batch_of(consumed_samples // SEQUENCES, self.shape)


def with_deepspeed(
    model_folder: str, stage: int, steps: tuple[int, int], save_to: str | None = None, load: str | None = None
) -> list[float]:
    """The losses of some steps of transformers' model under DeepSpeed's engine, all ranks' together."""
    import deepspeed
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    # It would be compiled here, and gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = shape_of_folder(model_folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES // world,
        "gradient_clipping": OURS["optimizer.gradient_clipping"],
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "checkpoint": {"load_universal": load is not None},
        "steps_per_print": 1_000_000,
    }
    first, *others = model.parameters()
    # Two groups are two of ZeRO 3's sub-groups, which must not share a counter.
    groups = [{"params": [first]}, {"params": others}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    if load is not None:
        engine.load_checkpoint(load)
        assert engine.global_steps == steps[0]
        if stage == 3:
            for state in engine.optimizer.optimizer.state.values():
                state["step"] = torch.tensor(float(state["step"]))
    losses = []
    for step in range(*steps):
        batch = batch_of(step, shape)
        share = SEQUENCES // world
        batch = rows_of(batch, slice(rank * share, (rank + 1) * share))
        logits = engine(input_ids=batch.input_ids).logits
        loss = cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
        if save_to is not None and step + 1 == SAVED:
            engine.save_checkpoint(save_to)
    return losses


def made_universal(folder: str, output: str) -> None:
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=folder,
            output_folder=output,
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def with_megalite(model_folder: str, layout: Settings, resume: str, folder: str) -> list[float]:
    """The losses from SAVED on; a checkpoint at MOVED."""
    config = config_of({**OURS, **layout, "model.hf_config": model_folder})
    mesh = ParallelMesh.over_world(config.layout)
    shape = shape_of_folder(model_folder)
    trainer = TrainStep(config, mesh, shape, cast(StepLoader, StepsOfBoth(mesh, shape)))
    trainer.resume(Path(resume))
    assert trainer.state.step == SAVED
    losses = []
    while trainer.state.step < END:
        losses.append(trainer.train_step().loss)
        if trainer.state.step == MOVED:
            save(trainer, Path(folder))
    return losses


def moments_differing(checkpoint: Path, universal: Path, shape: ModelShape) -> list[str]:
    """Where the checkpoint's numbers are not those of the universal folder's files."""
    differing, shapes = [], canonical_tensors(shape)
    with CheckpointReader(checkpoint) as reader:
        for tensor in family_tensors(shape):
            for theirs, ours in (("fp32", "weight"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                content = torch.load(universal / "zero" / tensor.name / f"{theirs}.pt", weights_only=False)
                values = content["param"] if isinstance(content, dict) else content
                if not torch.equal(
                    values.view(tensor.shape), read_family_tensor(reader, ours, tensor, shapes)
                ):
                    differing.append(f"{theirs} of {tensor.name}")
    return differing


JOURNEYS = {
    "llama, ZeRO 2 to tp2 x pp2 to ZeRO 1 on one rank": (tiny_shape(tied=True), 2, 1, 1),
    "gpt2, ZeRO 3 to tp2 x pp2 to ZeRO 3": (FAMILY_SHAPES["gpt2"], 3, 3, 2),
}


@pytest.mark.parametrize(("shape", "stage", "back", "back_ranks"), JOURNEYS.values(), ids=JOURNEYS)
def test_a_run_goes_on_from_deepspeed_and_back(
    ranks: RankPool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    shape: ModelShape,
    stage: int,
    back: int,
    back_ranks: int,
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(hf_config(shape, "float32", {})))
    engine, universal = tmp_path / "engine", tmp_path / "engine" / "universal"
    theirs, *_ = ranks.run(
        with_deepspeed, 2, model_folder=str(model), stage=stage, steps=(0, END), save_to=str(engine)
    )
    ranks.run(made_universal, 1, folder=str(engine / f"global_step{SAVED}"), output=str(universal))

    convert.run(["inspect", str(universal)])
    assert f"step {SAVED}, {SAVED} updates" in capsys.readouterr().out
    convert.run(["import", str(engine), str(tmp_path / "run"), "--hf-config", str(model)])
    said = capsys.readouterr().out
    assert re.search(r"optimizer.learning_rate = 0.01, optimizer.betas = .0.9, 0.95., ", said)
    imported = tmp_path / "run" / "checkpoints" / f"step-{SAVED:06d}"
    assert moments_differing(imported, universal, shape) == []

    ours, *_ = ranks.run(
        with_megalite,
        4,
        model_folder=str(model),
        layout={"parallel.tensor": 2, "parallel.pipeline": 2},
        resume=str(imported),
        folder=str(tmp_path / "moved"),
    )
    assert ours == about(theirs[SAVED:], ENGINE_RTOL)

    convert.run(["universal", str(tmp_path / "moved"), str(tmp_path / "left")])
    left, *_ = ranks.run(
        with_deepspeed,
        back_ranks,
        model_folder=str(tmp_path / "left"),
        stage=back,
        steps=(MOVED, END),
        load=str(tmp_path / "left"),
    )
    assert left == about(ours[MOVED - SAVED :], ENGINE_RTOL)
