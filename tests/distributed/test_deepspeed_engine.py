"""A run of DeepSpeed's engine goes on here from the folder that `engine.save_checkpoint` wrote."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.reader import CheckpointReader
from megalite.cli import convert
from megalite.config.sections.training_section import PrecisionSettings
from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.deepspeed.training_state import loss_scale
from megalite.convert.foreign.unpickle import load_pickle
from megalite.convert.huggingface.export import read_family_tensor
from megalite.data.batches.loader import StepLoader
from megalite.families.registry import family_tensors, hf_config
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.step_batch import StepBatch
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.train.optimizer.loss_scale import LossScale
from megalite.train.step.train_step import TrainStep
from tests.support.engine_runs import (
    ADAMW,
    CLIPPING,
    MOMENTS,
    SEQUENCES,
    EngineJob,
    EngineRun,
    batch_of,
    run_engine,
)
from tests.support.foreign import import_folder
from tests.support.jobs import ROOT
from tests.support.matrix.axes import BASE, Settings
from tests.support.matrix.rows import config_of
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.ranks import RankPool
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.waiting import PATIENCE

OURS: Settings = {
    **BASE,
    "training.precision": "fp32",
    "training.steps": 5,
    "training.micro_batches": 4,
    "training.micro_batch_size": 2,
    "optimizer.name": "adamw",
    "optimizer.learning_rate": ADAMW["lr"],
    "optimizer.gradient_clipping": CLIPPING,
    "optimizer.weight_decay": ADAMW["weight_decay"],
}
LLAMA, GPT2 = tiny_shape(tied=True, layers=2), replace(FAMILY_SHAPES["gpt2"], num_hidden_layers=2)
LAYOUTS: dict[int, Settings] = {1: {}, 4: {"parallel.tensor": 2, "parallel.pipeline": 2}}
SUB_GROUPS = {"stage": 3, "sub_group_size": 5000, "stage3_param_persistence_threshold": 100}
ROUND_ROBIN = {"stage": 2, "round_robin_gradients": True}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP32_SUMS: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
# The gradients of the fourth step overflow with this scale.
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 2}}


@dataclass(frozen=True)
class OurSteps:
    """In a StepLoader's place: the rows of the step that the position in the data names; fixed: always of step 0."""

    shape: ModelShape
    fixed: bool

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype) -> StepBatch:
        return batch_of(0 if self.fixed else consumed_samples // SEQUENCES, self.shape.vocab_size)


def next_steps(
    model_folder: str, layout: Settings, resume: str, fixed: bool = False
) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of the two steps after a checkpoint; the second sees what the moments did."""
    config = config_of({**OURS, **layout, "model.hf_config": model_folder})
    mesh, shape = ParallelMesh.over_world(config.layout), shape_of_folder(model_folder)
    trainer = TrainStep(config, mesh, shape, cast(StepLoader, OurSteps(shape, fixed)))
    trainer.resume(Path(resume))
    reports = [trainer.train_step() for _ in range(2)]
    return [report.loss for report in reports], [report.grad_norm for report in reports]


def model_of(folder: Path, shape: ModelShape) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(shape, "float32", {})))
    return folder


def differing(checkpoint: Path, run: EngineRun, shape: ModelShape) -> list[str]:
    """Return the tensors of the imported checkpoint that are not those of the engine, bit for bit."""
    names, shapes = [], canonical_tensors(shape)
    zeros = {
        name: {"fp32": values, **dict.fromkeys(MOMENTS, torch.zeros_like(values))}
        for name, values in run.frozen.items()
    }
    expected = {name.removeprefix("module."): states for name, states in {**run.states, **zeros}.items()}
    with CheckpointReader(checkpoint) as reader:
        for tensor in family_tensors(shape):
            for theirs, ours in zip(("fp32", *MOMENTS), ("weight", *MOMENTS), strict=True):
                values = read_family_tensor(reader, ours, tensor, shapes)
                if not torch.equal(values, expected[tensor.name][theirs].view(tensor.shape)):
                    names.append(f"{theirs} of {tensor.name}")
    return names


GOING_ON: dict[str, tuple[ModelShape, EngineJob]] = {
    "llama, ZeRO 0": (LLAMA, EngineJob("", "", {"stage": 0})),
    "llama, ZeRO 1, wrapped": (LLAMA, EngineJob("", "", {"stage": 1}, wrap=True)),
    "gpt2, ZeRO 2": (GPT2, EngineJob("", "", {"stage": 2})),
    "llama, ZeRO 3 of several sub-groups": (LLAMA, EngineJob("", "", SUB_GROUPS)),
}


@pytest.mark.extended
@pytest.mark.parametrize(("shape", "job"), GOING_ON.values(), ids=GOING_ON)
def test_the_next_step_here_is_the_next_step_there(
    ranks: RankPool, tmp_path: Path, shape: ModelShape, job: EngineJob
) -> None:
    model = model_of(tmp_path / "model", shape)
    job = replace(job, model_folder=str(model), folder=str(tmp_path / "engine"))
    theirs, *_ = ranks.run(run_engine, 2, job=job)
    imported = import_folder(tmp_path / "engine", tmp_path / "run", hf_config=model)
    assert imported.format == "a checkpoint of DeepSpeed's engine" and imported.step == 3
    assert differing(imported.checkpoint, theirs, shape) == []
    for world, layout in LAYOUTS.items():
        losses, norms = ranks.run(
            next_steps, world, model_folder=str(model), layout=layout, resume=str(imported.checkpoint)
        )[0]
        assert_close(losses, theirs.losses[-2:], rtol=FLOAT32_RTOL, what=f"losses on {world}")
        assert_close(norms, theirs.norms[-2:], rtol=FLOAT32_RTOL, what=f"norms on {world}")
    convert.run(["export", str(tmp_path / "engine"), str(tmp_path / "left"), "--hf-config", str(model)])
    assert_close(logits_of(tmp_path / "left"), theirs.logits, rtol=FLOAT32_RTOL, what="logits")


def logits_of(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(input_ids=batch_of(0, 101).input_ids[:2]).logits


OFFLOADED = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
EXACT: dict[str, tuple[ModelShape, EngineJob, str]] = {
    "gpt2, ZeRO 2, round robin": (GPT2, EngineJob("", "", ROUND_ROBIN), "DeepSpeedZeroOptimizer"),
    "gpt2, ZeRO 2, aligned parameters": (
        replace(GPT2, intermediate_size=77),
        EngineJob("", "", {"stage": 2, "parameter_alignment": True}),
        "DeepSpeedZeroOptimizer",
    ),
    "llama, ZeRO 0, bf16": (LLAMA, EngineJob("", "", {"stage": 0}, BF16), "FP16_UnfusedOptimizer"),
    "gpt2, ZeRO 0, fp16, fused": (GPT2, EngineJob("", "", {"stage": 0}, FP16, fused=True), "FP16_Optimizer"),
    "llama, ZeRO 1, bf16": (LLAMA, EngineJob("", "", {"stage": 1}, {**BF16, **FP32_SUMS}), "BF16_Optimizer"),
    "llama, ZeRO 1, fp16, offloaded": (LLAMA, EngineJob("", "", OFFLOADED, FP16), "DeepSpeedZeroOptimizer"),
    "gpt2, ZeRO 1, bf16, frozen": (
        GPT2,
        EngineJob("", "", {"stage": 1}, BF16, frozen="wte"),
        "DeepSpeedZeroOptimizer",
    ),
    "llama, ZeRO 2, bf16, frozen": (
        LLAMA,
        EngineJob("", "", {"stage": 2}, BF16, frozen="mlp"),
        "DeepSpeedZeroOptimizer",
    ),
    "llama, ZeRO 3, bf16, frozen": (
        LLAMA,
        EngineJob("", "", SUB_GROUPS, BF16, frozen="embed"),
        "DeepSpeedZeroOptimizer_Stage3",
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize(("shape", "job", "optimizer"), EXACT.values(), ids=EXACT)
def test_every_optimizer_of_the_engine_is_read_bit_for_bit(
    ranks: RankPool, tmp_path: Path, shape: ModelShape, job: EngineJob, optimizer: str
) -> None:
    model = model_of(tmp_path / "model", shape)
    job = replace(job, model_folder=str(model), folder=str(tmp_path / "engine"), steps=6, saved=6)
    theirs, *_ = ranks.run(run_engine, 2, job=job)
    assert theirs.optimizer == optimizer
    imported = import_folder(tmp_path / "engine", tmp_path / "run", hf_config=model)
    assert differing(imported.checkpoint, theirs, shape) == []
    with CheckpointReader(imported.checkpoint) as reader:
        state, scalars = reader.manifest.trainer_state, reader.manifest.optimizer
    skipped = theirs.counters["skipped_steps"]
    assert skipped == (1 if job.zero == OFFLOADED else 0)
    assert (state["step"], state["samples"], state["skipped_steps"]) == (6, 6 * SEQUENCES, skipped)
    assert scalars["step"] == theirs.counters["updates"]
    assert scalars.get("loss_scale", 1) == theirs.counters["loss_scale"]


def with_trainer(model_folder: str, folder: str) -> list[dict[str, float]]:
    """Train transformers' Trainer under ZeRO 2 on the same global batch at every step; return its log of each step."""
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    batch = batch_of(0, LLAMA.vocab_size)
    rows = torch.cat([batch.input_ids, batch.labels[:, -1:]], dim=1)
    automatic = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed={"zero_optimization": {"stage": 2}, **dict.fromkeys(automatic, "auto")}
        | {"zero_allow_untested_optimizer": True},
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        per_device_train_batch_size=SEQUENCES // 2,
        max_steps=5,
        save_steps=3,
        logging_steps=1,
        learning_rate=ADAMW["lr"],
        adam_beta2=ADAMW["betas"][1],
        weight_decay=ADAMW["weight_decay"],
        max_grad_norm=CLIPPING,
        lr_scheduler_type="constant",
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder))
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.extended
def test_a_checkpoint_of_transformers_trainer_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", LLAMA)
    logged, *_ = ranks.run(with_trainer, 2, model_folder=str(model), folder=str(tmp_path / "out"))
    imported = import_folder(tmp_path / "out" / "checkpoint-3", tmp_path / "run")
    assert imported.format == "a checkpoint of DeepSpeed's engine" and imported.step == 3
    arguments = {"model_folder": str(model), "layout": {}, "resume": str(imported.checkpoint), "fixed": True}
    losses, norms = ranks.run(next_steps, 1, **arguments)[0]
    assert_close(losses, [entry["loss"] for entry in logged[-2:]], rtol=FLOAT32_RTOL, what="losses")
    assert_close(norms, [entry["grad_norm"] for entry in logged[-2:]], rtol=FLOAT32_RTOL, what="norms")


def loss_scales(folder: str, seed: int) -> tuple[list[float], list[float]]:
    """Return the scales of DeepSpeed's scaler and of ours over random overflows; ours goes on anew at every step."""
    import deepspeed.comm as dist
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    dist.init_distributed(dist_backend="gloo", verbose=False)
    theirs = DynamicLossScaler(
        2.0**16, scale_window=3, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
    )
    overflows = torch.rand(40, generator=torch.Generator().manual_seed(seed)) < 0.3
    settings = PrecisionSettings(loss_scale_window=3, loss_scale_hysteresis=2)
    expected, scales = [], []
    for overflow in overflows.tolist():
        torch.save({"loss_scaler": theirs}, path := Path(folder) / "scaler.pt")
        ours = LossScale(settings)
        ours.load(loss_scale(load_pickle(path)))
        theirs.update_scale(overflow)
        ours.overflowed() if overflow else ours.passed()
        expected.append(theirs.cur_scale)
        scales.append(ours.value)
    return expected, scales


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_scale_changes_as_theirs_would(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    [(expected, scales)] = ranks.run(loss_scales, 1, folder=str(tmp_path), seed=seed)
    assert scales == expected and len(set(expected)) > 4


WITHOUT_COMPILER = """
import os, sys
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
import torch.distributed as dist
from tests.support.tiny import tiny_shape
from tests.support.training import Job, build
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
build(Job(tiny_shape(), zero_stage=1, dtype=torch.float32))
print("torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.extended
def test_an_engine_does_not_import_the_compiler() -> None:
    """Two seconds of every start, for DeepSpeed's own Muon."""
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "False"
