"""The common part of the torch and the DeepSpeed path: a run's optimizer, its step count, the sums of gradients."""

from collections.abc import Mapping
from importlib import import_module

import torch
from torch import Tensor, nn

from megalite.model.replica import Replica
from megalite.parallel.gradient_buckets import GradientBuckets
from megalite.parallel.gradients import waits_for_other_ranks
from megalite.topology.experts import EXPERT_AXIS
from megalite.topology.state import EMA
from megalite.train.optimizer.rule import OptimizerParts, ensure_state
from megalite.train.optimizer.settings import OptimizerSettings

# Methods that torch's compiler may not trace: torch imports it at their first call, unless they are marked.
_UNTRACED = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")


def spare_compiler() -> None:
    """Let torch's optimizers be made without torch's compiler, whose import takes as long as torch's own.

    A run that compiles its layers imports it all the same. Where torch has no such marks, nothing changes.
    """
    for name in _UNTRACED:
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            vars(method).setdefault("__dynamo_disable", method)


def torch_optimizer(parts: OptimizerParts) -> torch.optim.Optimizer:
    """Return the optimizer of the settings, with the moving average of the weights if ema_decay is set.

    The module of its name in this folder makes it (topology/optimizers.py).
    """
    spare_compiler()
    module = import_module(f"megalite.train.optimizer.{parts.settings.optimizer.name}")
    optimizer: torch.optim.Optimizer = module.make(parts)
    keep_average(optimizer, parts.settings)
    return optimizer


def keep_average(optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> None:
    """Keep the average of the weights, if asked for: by hooks, as it may update masters or ZeRO's partitions."""
    if settings.optimizer.ema_decay:
        optimizer.register_step_pre_hook(lambda self, _arguments, _keywords: ensure_state(self))
        optimizer.register_step_post_hook(lambda self, _arguments, _keywords: _average_weights(self))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["learning_rate_ratio"]


@torch.no_grad()
def _average_weights(optimizer: torch.optim.Optimizer) -> None:
    """Move the exponential moving average of the weights (Polyak and Juditsky 1992) towards the new ones."""
    for group in optimizer.param_groups:
        averages = [optimizer.state[tensor][EMA] for tensor in group["params"]]
        if averages:
            torch._foreach_lerp_(averages, list(group["params"]), 1 - group["ema_decay"])


def accumulate_in_float32(tensors: Mapping[str, nn.Parameter]) -> None:
    """Let autograd sum the gradients of low-precision parameters in fp32."""
    for tensor in tensors.values():
        if tensor.element_size() < 4:
            tensor.grad_dtype = torch.float32


def gradient_buckets(
    replica: Replica, *, bucket_bytes: int = 0, dtype: torch.dtype | None = None
) -> GradientBuckets | None:
    """Return the sums over copies of weights; None where this rank's weights have no copies.

    bucket_bytes, dtype: those of GradientBuckets.
    """
    tensors, mesh = replica.trained_tensors, replica.mesh
    copies = {tensors[each.name]: mesh.copies(each) for each in replica.trained}
    if all(ranks.size == 1 for ranks in copies.values()):
        return None
    return GradientBuckets(
        {chunk.index: tuple(chunk.layers) for chunk in replica.stage.chunks},
        copies,
        [tensors[each.name] for each in replica.trained if waits_for_other_ranks(each, mesh)],
        uneven=[tensors[each.name] for each in replica.trained if each.spec.axis == EXPERT_AXIS],
        bucket_bytes=bucket_bytes,
        dtype=dtype,
    )


def step_count(optimizer: torch.optim.Optimizer) -> float:
    """Return the number of updates so far, for Adam's bias correction; 0 for SGD and Lion, which do not count."""
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(counts, default=0.0)


def set_step_count(optimizer: torch.optim.Optimizer, count: float) -> None:
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(count)
        elif "step" in state:
            state["step"] = int(count)
