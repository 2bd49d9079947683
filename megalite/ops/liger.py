"""Liger's Triton kernels in the forms that a model calls, where the package is installed (Hsu et al., "Liger Kernel",
2024). Candidates of the self-test: used where they are right on a card and the fastest there.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

LIGER = "liger"


def why_not(device_type: str) -> str:
    """Why they cannot run on devices of this type here; empty where they can."""
    if device_type != "cuda":
        return f"liger_kernel has no kernels for devices of type {device_type}"
    return "" if find_spec("liger_kernel") else "liger_kernel is not installed"


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As of ops.norms.rms_norm; one node gives both gradients."""
    # In place it would overwrite the gradient of its output, which other autograd nodes may share.
    normalised: Tensor = _functional().liger_rms_norm(hidden_states, weight, eps, in_place=False)
    return normalised


def swiglu(gate_up: Tensor) -> Tensor:
    """As of ops.activations.swiglu."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated: Tensor = _functional().liger_swiglu(gate, up)
    return activated


def _functional() -> Any:
    return import_module("liger_kernel.transformers.functional")
