"""Which form of its operators a model uses here, and why: csrc's compiled ones or plain torch."""

from dataclasses import dataclass
from typing import Literal

import torch

from megalite.errors import ConfigError, Problem
from megalite.model.options import Kernels
from megalite.ops import extension


@dataclass(frozen=True)
class Part:
    """A part of the model: the operator of csrc that it uses, in words too, and its plain form."""

    operator: str
    fused: str
    reference: str


PARTS = {
    "optimizer": Part(
        "adamw_", "compiled: norm, clipping, AdamW and the rounded weights", "torch's fused AdamW"
    ),
    "attention": Part(
        "attention_forward",
        "compiled to drop probabilities, on a CPU for windows, documents and AVX-512 too, else torch's; soft caps "
        "(Gemma 2) in plain torch, since neither has them",
        "torch's scaled_dot_product_attention",
    ),
    "norms": Part(
        "norm",
        "compiled, with the residual add before; plain torch for 1 + weight (Gemma) in 16 bits, which would round it",
        "torch behind autograd nodes of our own",
    ),
    "loss": Part(
        "cross_entropy_statistics", "compiled, the gradient over the logits", "torch, over the logits"
    ),
    "rotary": Part(
        "rotary_split", "compiled, from the packed heads", "torch behind autograd nodes of our own"
    ),
    "SwiGLU, GeGLU": Part("glu", "compiled", "torch, SwiGLU behind an autograd node of our own"),
    "bias + GELU": Part("bias_gelu", "compiled", "torch's GELU of the product with its bias"),
}


@dataclass(frozen=True)
class KernelChoice:
    """What model.kernels means on a device; why: what decided it, for people."""

    name: Kernels
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def choose_kernels(asked: Literal["auto", "fused", "reference"], device_type: str) -> KernelChoice:
    """Raises ConfigError where compiled operators are asked for and cannot run on this machine's devices."""
    if asked == "reference":
        return KernelChoice("reference", 'model.kernels = "reference"')
    complaint = extension.why_not(device_type)
    if not complaint:
        return KernelChoice("fused", extension.built().said)
    if asked == "auto":
        return KernelChoice("reference", f"no compiled operators here: {complaint}")
    message = f'"fused": the compiled operators cannot run here: {complaint}'
    raise ConfigError([Problem("model.kernels", message, 'or use "auto" or "reference"')])


def used_parts(device_type: str) -> dict[str, str]:
    """Part -> the operator it uses with model.kernels = "auto"; with "reference", always its plain form."""
    choice = choose_kernels("auto", device_type)
    return {
        name: part.fused
        if choice.name == "fused" and hasattr(torch.ops.megalite, part.operator)
        else part.reference
        for name, part in PARTS.items()
    }
