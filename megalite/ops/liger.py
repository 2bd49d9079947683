"""Liger's Triton kernels (Hsu et al., "Liger Kernel", 2024), with our signatures, where the package is installed.

They are candidates of the self-test: used on a card where they are right and the fastest.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from megalite.ops import norms
from megalite.ops.activations import GatedActivations, geglu

LIGER = "liger"


def why_not(device_type: str) -> str:
    """Return why Liger's kernels cannot run on devices of this type here; empty if they can."""
    if device_type != "cuda":
        return f"liger_kernel has no kernels for devices of type {device_type}"
    return "" if find_spec("liger_kernel") else "liger_kernel is not installed"


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool = False
) -> Tensor:
    """Same as ops.norms.norm: by torch for 1 + weight, which Liger lacks, and LayerNorm, not a candidate."""
    if bias is not None or zero_centered_gamma:
        return norms.norm(x, weight, bias, eps, zero_centered_gamma)
    # in_place would overwrite the output's gradient, which other autograd nodes may share.
    normalised: Tensor = _functional().liger_rms_norm(x, weight, eps, in_place=False)
    return normalised


def swiglu(gate_up: Tensor) -> Tensor:
    """Same as ops.activations.swiglu."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated: Tensor = _functional().liger_swiglu(gate, up)
    return activated


GLU = GatedActivations(swiglu, geglu)


def _functional() -> Any:
    return import_module("liger_kernel.transformers.functional")
