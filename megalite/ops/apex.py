"""NVIDIA Apex's compiled kernels, with the signatures of ops/adamw.py, where they are installed.

They are candidates of the self-test: used on a card where they are right and the fastest. The package `apex` on PyPI is
another project, and NVIDIA's own may lack its compiled modules, so only the compiled modules are looked for and
imported. MEGALITE_NO_APEX=1 turns them off.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from megalite.launcher.rank.environment import without_apex
from megalite.ops import adamw
from megalite.ops.adamw import AdamWRule, AdamWTensors, copy_rounded

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
def adamw_(tensors: AdamWTensors, rule: AdamWRule) -> None:
    """Same as `ops.adamw.adamw_`; by torch unless all weights are float32, the only type that Apex supports."""
    weights = tensors.weights
    if any(weight.dtype != torch.float32 for weight in weights):
        return adamw.adamw_(tensors, rule)
    if not weights:
        return
    scaled = [gradient.float() * rule.gradient_scale for gradient in tensors.gradients]
    lists = [scaled, [*weights], [*tensors.exp_avgs], [*tensors.exp_avg_sqs]]
    # Where the kernel reports an infinity; not read, because the gradient's norm tells.
    overflow = torch.zeros(1, dtype=torch.int32, device=weights[0].device)
    decoupled, corrected = 1, 1
    numbers = (
        rule.learning_rate,
        *rule.betas,
        rule.eps,
        int(rule.step),
        decoupled,
        corrected,
        rule.weight_decay,
    )
    import_module(OPTIMIZERS).multi_tensor_adam(_CHUNK, overflow, lists, *numbers)
    copy_rounded(tensors)


@torch.no_grad()
def add_weight_gradient_(total: Tensor, grad: Tensor, inputs: Tensor) -> None:
    """Same as `ops.adamw.add_weight_gradient_`, for a float32 sum; the product is not rounded to low precision."""
    import_module(WEIGHT_GRADIENTS).wgrad_gemm_accum_fp32(inputs.contiguous(), grad.contiguous(), total)
