"""NVIDIA Apex's compiled kernels, with the signatures of ops/adamw.py, where they are installed.

They are candidates of the self-test: used on a card where they are right and the fastest. The package `apex` on PyPI is
another project, and NVIDIA's own may lack its compiled modules, so only the compiled modules are looked for and
imported. MEGALITE_NO_APEX=1 turns them off.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megalite.launcher.environment import without_apex

APEX = "apex"
OPTIMIZERS, WEIGHT_GRADIENTS = "amp_C", "fused_weight_gradient_mlp_cuda"
"""The compiled modules."""
_CHUNK = 2048 * 32  # elements a thread block processes, as in Apex's own optimizers


def modules() -> list[str]:
    """The compiled modules that are installed; none with MEGALITE_NO_APEX=1. Imports nothing."""
    return [] if without_apex() else [name for name in (OPTIMIZERS, WEIGHT_GRADIENTS) if find_spec(name)]


def why_not(module: str) -> Callable[[str], str]:
    """Return a function: device type -> why the kernels of a compiled module cannot run here; empty if they can."""

    def why_not_on(device_type: str) -> str:
        if device_type != "cuda":
            return f"Apex has no kernels for devices of type {device_type}"
        if without_apex():
            return "MEGALITE_NO_APEX=1"
        return "" if module in modules() else f"Apex's compiled module {module} is not installed"

    return why_not_on


@torch.no_grad()
def adamw_(
    weights: Sequence[Tensor],
    copies: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: float,
    gradient_scale: float = 1.0,
) -> None:
    """Same as `ops.adamw.adamw_`, for float32 weights."""
    if not weights:
        return
    scaled = [gradient.float() * gradient_scale for gradient in gradients]
    lists = [scaled, [*weights], [*exp_avgs], [*exp_avg_sqs]]
    # The kernel's overflow flag. Not read: the gradient norm already shows infinities.
    overflow = torch.zeros(1, dtype=torch.int32, device=weights[0].device)
    decoupled, corrected = 1, 1
    rules: tuple[Any, ...] = (learning_rate, *betas, eps, int(step), decoupled, corrected, weight_decay)
    import_module(OPTIMIZERS).multi_tensor_adam(_CHUNK, overflow, lists, *rules)
    for copy, weight in zip(copies, weights, strict=bool(copies)):
        copy.copy_(weight)


@torch.no_grad()
def add_weight_gradient_(total: Tensor, grad: Tensor, inputs: Tensor) -> None:
    """Same as `ops.adamw.add_weight_gradient_`, for a float32 sum; the product is not rounded to low precision."""
    import_module(WEIGHT_GRADIENTS).wgrad_gemm_accum_fp32(inputs.contiguous(), grad.contiguous(), total)
