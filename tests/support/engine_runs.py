"""Runs of a transformers model under DeepSpeed's engine: their losses and norms, and the states that the engine has."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from megalite.parallel.step_batch import StepBatch
from tests.support.training import fp16_allowed, rows_of

SEQUENCES, LENGTH = 8, 12
ADAMW = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True}
CLIPPING = 0.5
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
MOMENTS = ("exp_avg", "exp_avg_sq")

States = dict[str, dict[str, Tensor]]
"""Parameter -> "fp32", "exp_avg" or "exp_avg_sq" -> values."""


@dataclass(frozen=True)
class EngineJob:
    """A run. zero: `zero_optimization`. keys: further ones of the JSON. frozen: part of names that are not trained.

    groups: norms and biases without weight decay, in a group of their own. saved: the step after which the engine saves
    in `folder`. fused: as with FusedAdam, which needs a GPU.
    """

    model_folder: str
    folder: str
    zero: Mapping[str, Any]
    keys: Mapping[str, Any] = field(default_factory=dict)
    frozen: str = ""
    groups: bool = True
    saved: int = 3
    steps: int = 5
    fused: bool = False
    wrap: bool = False


@dataclass(frozen=True)
class EngineRun:
    """Losses and norms of all steps; states, logits and counters when the engine saved; the optimizer's class."""

    losses: Sequence[float]
    norms: Sequence[float]
    states: States
    frozen: Mapping[str, Tensor]
    logits: Tensor
    counters: Mapping[str, float]
    optimizer: str


def batch_of(step: int, vocab_size: int) -> StepBatch:
    """Return the rows of a step for every program; all tokens count alike."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(vocab_size, (SEQUENCES, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).repeat(SEQUENCES, 1)
    samples = torch.arange(SEQUENCES) + step * SEQUENCES
    ones = torch.ones(SEQUENCES, LENGTH)
    return StepBatch(ids[:, :-1].contiguous(), positions, ids[:, 1:].contiguous(), ones, samples)


class Wrapped(torch.nn.Module):
    """A model as an attribute, so that its names begin with "module."."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.module = model

    def forward(self, **inputs: Tensor) -> Any:
        return self.module(**inputs)


def run_engine(job: EngineJob) -> EngineRun:
    """Train on all ranks of the process group; the model has transformers' initial weights of the seed 1."""
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    # It would be compiled here, and gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.model_folder))
    model = Wrapped(model) if job.wrap else model
    rank, world = dist.get_rank(), dist.get_world_size()
    share = slice(rank * SEQUENCES // world, (rank + 1) * SEQUENCES // world)
    with fp16_allowed(), mock.patch("deepspeed.runtime.engine.FusedAdam", _fused_class(job)):
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=_parameters(job, model), config=_config(job, world)
        )
        losses: list[float] = []
        norms: list[float] = []
        for step in range(job.steps):
            batch = rows_of(batch_of(step, 101), share)
            output = engine(input_ids=batch.input_ids).logits
            loss = cross_entropy(output.flatten(0, 1).float(), batch.labels.flatten())
            engine.backward(loss)
            own_norm = _norm(engine)
            engine.step()
            mean = loss.detach() / world
            dist.all_reduce(mean)
            losses.append(mean.item())
            norms.append(float(engine.get_global_grad_norm() or own_norm))
            if step + 1 == job.saved:
                engine.save_checkpoint(job.folder)
                states, frozen, logits = states_of(engine), _frozen(engine.module), _logits(engine)
                counters = {name: getattr(engine, name) for name in COUNTERS}
                moments = getattr(engine.optimizer, "optimizer", engine.optimizer).state
                counters["updates"] = float(next(iter(moments.values()))["step"])
                counters["loss_scale"] = float(getattr(engine.optimizer, "loss_scale", 1))
    kind = type(engine.optimizer).__name__
    return EngineRun(losses, norms, states, frozen, logits, counters, kind)


def states_of(engine: Any) -> States:
    """Return whole masters and moments by name, from the memory of the engine's optimizer."""
    stage, names = (
        engine.zero_optimization_stage(),
        {id(p): name for name, p in engine.module.named_parameters()},
    )
    if stage == 3:
        return _states_of_zero3(engine.module)
    pairs = _partitioned(engine.optimizer) if stage else _unpartitioned(engine.optimizer)
    return {names[id(parameter)]: states for parameter, states in pairs}


def _frozen(model: torch.nn.Module) -> dict[str, Tensor]:
    import deepspeed

    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    partitioned = [parameter for parameter in frozen.values() if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned):
        return {name: parameter.detach().float().clone() for name, parameter in frozen.items()}


def _states_of_zero3(model: torch.nn.Module) -> States:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return {
        name: {"fp32": safe_get_full_fp32_param(parameter).clone()}
        | {key: safe_get_full_optimizer_state(parameter, key).clone() for key in MOMENTS}
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _partitioned(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the parameters of ZeRO 1 and 2 in the order in which their group was flattened."""
    old = hasattr(optimizer, "bf16_groups")
    groups = optimizer.bf16_groups if old else optimizer.round_robin_bit16_groups
    flats = optimizer.fp32_groups_flat_partition if old else optimizer.single_partition_of_fp32_groups
    for index, (parameters, flat) in enumerate(zip(groups, flats, strict=True)):
        moments = optimizer.optimizer.state[flat]
        whole = {
            key: _gathered(values)
            for key, values in {"fp32": flat, **{k: moments[k] for k in MOMENTS}}.items()
        }
        ends = [0, *accumulate(parameter.numel() for parameter in parameters)]
        offsets = ends if old else optimizer.round_robin_bit16_offsets[index]
        for start, parameter in zip(offsets, parameters, strict=False):
            flat_range = slice(start, start + parameter.numel())
            yield parameter, {key: values[flat_range].view(parameter.shape) for key, values in whole.items()}


def _gathered(partition: Tensor) -> Tensor:
    parts = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, partition.detach().clone())
    return torch.cat(parts)


def _unpartitioned(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    state = getattr(optimizer, "optimizer", optimizer).state
    for parameter, master in _masters(optimizer):
        start, end, flat = master
        whole = {"fp32": flat, **{key: state[flat][key] for key in MOMENTS}}
        yield (
            parameter,
            {key: x.detach().flatten()[start:end].view(parameter.shape).clone() for key, x in whole.items()},
        )


def _masters(optimizer: Any) -> Iterator[tuple[Tensor, tuple[int, int, Tensor]]]:
    """Yield each parameter, and the elements of which tensor the optimizer updates for it."""
    if hasattr(optimizer, "fp32_groups_flat"):
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            ends = [0, *accumulate(parameter.numel() for parameter in group)]
            yield from zip(group, ((*bounds, flat) for bounds in pairwise(ends)), strict=True)
        return
    if hasattr(optimizer, "fp32_groups"):
        pairs = [*zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)]
    else:
        pairs = [(group["params"], group["params"]) for group in optimizer.param_groups]
    for low, high in pairs:
        for parameter, master in zip(low, high, strict=True):
            yield parameter, (0, master.numel(), master)


def _parameters(job: EngineJob, model: torch.nn.Module) -> list[Any]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not job.frozen or job.frozen not in name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not job.groups:
        return trained
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def _config(job: EngineJob, world: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SEQUENCES // world,
        "gradient_clipping": CLIPPING,
        "zero_optimization": dict(job.zero),
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
        **job.keys,
    }


def _fused_class(job: EngineJob) -> type:
    return torch.optim.AdamW if job.fused else type("NoFusedAdam", (), {})


def _norm(engine: Any) -> float:
    """Return the norm of the gradients, which ZeRO 0 in fp32 does not keep."""
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0


@torch.no_grad()
def _logits(engine: Any) -> Tensor:
    return engine(input_ids=batch_of(0, 101).input_ids[:2]).logits.clone()
