"""From DeepSpeed's pipeline engine into a run: the same weights and moments, the same next steps, the same logits."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.cli import convert
from megalite.config.sources.huggingface import shape_of_folder
from megalite.data.batches.loader import StepLoader
from megalite.families.registry import hf_config
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.step_batch import StepBatch
from megalite.train.step.train_step import TrainStep
from tests.support.foreign import Imported, import_folder
from tests.support.matrix.axes import BASE, Settings
from tests.support.matrix.rows import config_of
from tests.support.neox_pipeline import (
    ADAM,
    CLIPPING,
    LENGTH,
    PADDED,
    SEQUENCES,
    EngineRun,
    Toy,
    cut,
    ids_of,
    run_engine,
)
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.ranks import RankPool
from tests.support.training import fp16_allowed

pytestmark = pytest.mark.extended
SAVED, END = 2, 4
STATES = ("weight", "exp_avg", "exp_avg_sq")
OURS: Settings = {
    **{name: value for name, value in BASE.items() if not name.startswith("model.")},
    "training.steps": END,
    "training.precision": "fp32",
    "training.micro_batches": 4,
    "training.micro_batch_size": 2,
    "optimizer.name": "adamw",
    "optimizer.learning_rate": ADAM["lr"],
    "optimizer.betas": ADAM["betas"],
    "optimizer.eps": ADAM["eps"],
    "optimizer.weight_decay": ADAM["weight_decay"],
    "optimizer.gradient_clipping": CLIPPING,
}
TOYS = {
    "NeoX, model 2 x pipeline 2, untied": Toy(model=2),
    "NeoX 1, pipeline 2 x data 2, tied, sequential": Toy(
        "neox 1", data=2, tied=True, parallel=False, rotary=1.0
    ),
    "NeoX 1, model 2, its llama, grouped": Toy(
        *("neox 1", 1, 2), kv_heads=2, parallel=False, rotary=1.0, rms=True, gated=True, biases=False
    ),
    "NeoX, model 2 x pipeline 2, its llama, grouped": Toy(
        model=2, kv_heads=2, parallel=False, rotary=1.0, rms=True, gated=True, biases=False
    ),
    "Megatron-DeepSpeed, model 2 x pipeline 2, GPT": Toy(
        "megatron", model=2, parallel=False, rotary=0, tied=True
    ),
    "Megatron-DeepSpeed, pipeline 2 x data 2, llama": Toy(
        *("megatron", 2, 1, 2), kv_heads=2, parallel=False, rotary=1.0, rms=True, gated=True, biases=False
    ),
}
# Computed in 16 bits there, or without a norm: only stored values are compared.
NARROW = {
    "NeoX, bf16, pipeline 2 x data 2": Toy(precision="bf16", data=2),
    "NeoX, bf16, ZeRO 0": Toy(precision="bf16", stage=0),
    "NeoX, fp16": Toy(precision="fp16"),
    "NeoX, ZeRO 0": Toy(data=2, stage=0),
    "NeoX, fp16, ZeRO 0": Toy(model=2, precision="fp16", stage=0),
    "NeoX, fp16, ZeRO 0, tied": Toy(precision="fp16", stage=0, tied=True),
}


@dataclass(frozen=True)
class Came:
    """A toy's run there, and its import."""

    folder: Path
    there: list[EngineRun]
    run: Path
    imported: Imported


@pytest.fixture(scope="module")
def came(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory):
    @cache
    def make(toy: Toy) -> Came:
        folder = tmp_path_factory.mktemp("engine")
        there = ranks.run(
            engine_on_rank, toy.world_size, toy=toy, folder=str(folder / "left"), saved=SAVED, end=END
        )
        return Came(folder / "left", there, folder / "run", import_folder(folder / "left", folder / "run"))

    return make


def engine_on_rank(toy: Toy, folder: str, saved: int, end: int) -> EngineRun:
    with fp16_allowed():
        return run_engine(toy, folder, saved, end)


def contents(checkpoint: Path, state_key: str) -> dict[str, Tensor]:
    with CheckpointReader(checkpoint) as reader:
        entries = reader.manifest.tensors[state_key]
        return {
            name: reader.read(state_key, name, full_slice(entry.shape)) for name, entry in entries.items()
        }


@pytest.mark.parametrize("toy", (TOYS | NARROW).values(), ids=TOYS | NARROW)
def test_masters_and_moments_are_the_engine_s_own_bit_for_bit(came, toy: Toy) -> None:
    journey = came(toy)
    checkpoint = journey.imported.checkpoint
    whole = [contents(checkpoint, state_key) for state_key in STATES]
    cuts = [[cut(toy, tensors, rank) for tensors in whole] for rank in range(toy.model)]
    compared = set()
    for rank in journey.there:
        for name, states in rank.states.items():
            if name.startswith("tied_modules.embed.") and rank.stage > 0:
                continue  # the last stage's copy
            ours = name.replace("tied_modules.embed", "1" if toy.program == "megatron" else "0")
            compared.add(ours)
            for state_key, theirs, parts in zip(STATES, states, cuts[rank.model_rank], strict=True):
                if state_key == "weight" and toy.parallel and is_sum(ours):
                    terms = {other.model_rank: other for other in journey.there if other.stage == rank.stage}
                    theirs = sum(term.states[name][0] for term in terms.values())
                assert torch.equal(theirs.view(parts[ours].shape), parts[ours]), f"{state_key} of {ours}"
    assert compared == cuts[0][0].keys()


def test_settings_counters_and_the_loss_scale_come_along(came) -> None:
    with CheckpointReader(came(NARROW["NeoX, fp16"]).imported.checkpoint) as reader:
        manifest = reader.manifest
    known = {"learning_rate": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert manifest.config["optimizer"] == {"name": "adamw", **known, "gradient_clipping": CLIPPING}
    assert manifest.trainer_state == {
        "step": SAVED,
        "samples": SAVED * SEQUENCES,
        "tokens": 0,
        "skipped_steps": 0,
    }
    assert manifest.optimizer == {
        "step": SAVED,
        "loss_scale": 2.0**16,
        "loss_scale_steps_since_change": SAVED - 1,
        "loss_scale_overflows_left": 2,
    }


def is_sum(name: str) -> bool:
    """Whether each model rank adds a term of its own with the parallel residual."""
    return name.endswith((".dense.bias", ".linear2.bias", ".dense_4h_to_h.bias"))


@dataclass(frozen=True)
class StepsOfBoth:
    """In a StepLoader's place: the batches of the toy's steps."""

    mesh: ParallelMesh

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype) -> StepBatch:
        ids = ids_of(consumed_samples // SEQUENCES)
        positions = torch.arange(LENGTH).repeat(SEQUENCES, 1)
        samples = torch.arange(SEQUENCES) + consumed_samples
        ones = torch.ones(SEQUENCES, LENGTH)
        return StepBatch(ids[:, :-1].contiguous(), positions, ids[:, 1:].contiguous(), ones, samples)


def continued(layout: Settings, model_folder: str, resume: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of the steps after the import."""
    config = config_of({**OURS, **layout, "model.hf_config": model_folder})
    shape = shape_of_folder(model_folder)
    mesh = ParallelMesh.over_world(config.layout)
    trainer = TrainStep(config, mesh, shape, cast(StepLoader, StepsOfBoth(mesh)))
    trainer.resume(Path(resume))
    assert trainer.state.step == SAVED
    reports = [trainer.train_step() for _ in range(END - SAVED)]
    return [(report.loss, report.grad_norm) for report in reports]


@pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
@pytest.mark.parametrize(
    "layout", [{}, {"parallel.tensor": 2, "parallel.pipeline": 2}], ids=["alone", "tp2 x pp2"]
)
def test_the_next_steps_are_the_engine_s_own(
    came, ranks: RankPool, tmp_path: Path, toy: Toy, layout: Settings
) -> None:
    journey = came(toy)
    model = tmp_path / "config.json"
    model.write_text(json.dumps(hf_config(journey.imported.shape, "float32", {})))
    resume = str(journey.imported.checkpoint)
    ours, *_ = ranks.run(
        continued, 4 if layout else 1, layout=layout, model_folder=str(tmp_path), resume=resume
    )
    # A sum over model ranks of biases is a parameter of ours with the learning rate of one.
    steps = 1 if toy.parallel and toy.model > 1 else END - SAVED
    theirs = journey.there[0].steps[SAVED:][:steps]
    assert_close([loss for loss, _ in ours[:steps]], [loss for loss, _ in theirs], rtol=FLOAT32_RTOL)
    assert_close([norm for _, norm in ours[:steps]], [norm for _, norm in theirs], rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
def test_the_exported_model_has_the_engine_s_logits(came, tmp_path: Path, toy: Toy) -> None:
    from transformers import AutoModelForCausalLM

    journey = came(toy)
    convert.run(["export", str(journey.run), str(tmp_path / "exported"), "--dtype", "float32"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        logits = model(ids_of(SAVED)[:2, :-1]).logits
    theirs = [rank.logits for rank in journey.there if rank.logits is not None]
    assert logits.shape == (2, LENGTH, PADDED) and len(theirs) == toy.model * toy.data
    assert_close(logits, theirs[0], rtol=FLOAT32_RTOL, what="logits")
