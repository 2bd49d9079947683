"""The choice of a model's operators on this machine, with its reason: compiled, another library's or plain torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from megalite.errors import ConfigError, Problem
from megalite.ops import extension
from megalite.ops.choice import ALL_COMPILED, COMPILED, NAMES, PLAIN_TORCH, TORCH, Operators
from megalite.ops.trust import UNTESTED, OperatorChoice, needs_proof

Asked = Literal["auto", "fused", "reference"]


@dataclass(frozen=True)
class KernelPart:
    """A part of the model: its compiled operator, a description of that operator, and of its plain torch form."""

    operator: str
    compiled: str
    reference: str


PARTS = {
    "optimizer": KernelPart(
        "adamw_", "compiled: norm, clipping, AdamW and the rounded weights", "torch's fused AdamW"
    ),
    "attention": KernelPart(
        "attention_forward",
        "compiled with dropout, and on a CPU with windows, documents or AVX-512; else torch's; soft caps (Gemma 2) "
        "in plain torch",
        "torch's scaled_dot_product_attention",
    ),
    "norms": KernelPart(
        "norm",
        "compiled, with the residual add before; plain torch for 1 + weight (Gemma) in bf16 and fp16, which round it",
        "torch in a custom autograd function",
    ),
    "loss": KernelPart(
        "cross_entropy_statistics", "compiled, the gradient over the logits", "torch, over the logits"
    ),
    "rotary": KernelPart(
        "rotary_split", "compiled, from the packed heads", "torch in a custom autograd function"
    ),
    "SwiGLU, GeGLU": KernelPart("glu", "compiled", "torch, SwiGLU in a custom autograd function"),
    "bias + GELU": KernelPart("bias_gelu", "compiled", "torch's GELU of the product with its bias"),
}


@dataclass(frozen=True)
class KernelChoice:
    """The operators that model.kernels stands for on a device; why: the reason, for people.

    name: "mixed" where an accelerator has some operators by torch and some by others.
    """

    name: Literal["fused", "reference", "mixed"]
    why: str
    operators: Operators = PLAIN_TORCH

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def choose_kernels(
    asked: Asked, device_type: str, choices: Mapping[str, OperatorChoice] | None = None
) -> KernelChoice:
    """Choose the compiled operators. choices: the choice for each of the model's operators on an accelerator.

    Raises ConfigError where compiled operators are asked for and cannot run, or have not proved themselves, here.
    """
    if asked == "reference":
        return KernelChoice("reference", 'model.kernels = "reference"')
    complaint = extension.why_not(device_type)
    if complaint and asked == "fused":
        message = f'"fused": the compiled operators cannot run here: {complaint}'
        raise ConfigError([Problem("model.kernels", message, 'or use "auto" or "reference"')])
    if not needs_proof(device_type):
        if complaint:
            return KernelChoice("reference", f"no compiled operators here: {complaint}")
        record = extension.built()
        return KernelChoice(
            "fused", f"compiled for {record.cpu or record.machine} by {record.cxx}", ALL_COMPILED
        )
    if asked == "fused":
        _require_proved(choices or {})
    if not choices:
        untested = UNTESTED if choices is None else "none is tested in this precision"
        return KernelChoice("reference", f"no compiled operators here: {complaint or untested}")
    return _proved(choices)


def _require_proved(choices: Mapping[str, OperatorChoice]) -> None:
    """ConfigError for every compiled operator that failed here or was not tested."""
    problems = [
        Problem(
            "model.kernels",
            f'"fused": the compiled {NAMES[operator]} ({operator}) cannot be trusted on this card: {fault}',
            'use "auto", which has torch compute it, or "reference"',
        )
        for operator, choice in choices.items()
        if (fault := choice.faults.get(COMPILED, ""))
    ]
    if not choices:
        message = '"fused": no operator is proved on this card'
        problems = [
            Problem("model.kernels", message, 'run megalite selftest with this run file, or use "auto"')
        ]
    if problems:
        raise ConfigError(problems)


def _proved(choices: Mapping[str, OperatorChoice]) -> KernelChoice:
    """One line that names every operator, by whom it is computed, and why torch computes it where it does."""
    by_name: dict[str, list[str]] = {}
    for operator, choice in choices.items():
        why = f"{operator} ({choice.why})" if choice.why else operator
        by_name.setdefault(choice.name, []).append(why)
    others = [f"{name}: {', '.join(operators)}" for name, operators in by_name.items() if name != TORCH]
    left = _shared_reason(choices)
    if not others:
        reasons = {choice.why for choice in choices.values()}
        said = f"no compiled operators here: {reasons.pop()}" if len(reasons) == 1 else left
        return KernelChoice("reference", said)
    operators = Operators({operator: choice.name for operator, choice in choices.items()})
    return KernelChoice("mixed", "; ".join([*others, *([f"torch: {left}"] if left else [])]), operators)


def _shared_reason(choices: Mapping[str, OperatorChoice]) -> str:
    """Return why torch computes its operators: each reason once, after the operators that it explains."""
    reasons: dict[str, list[str]] = {}
    for operator, choice in choices.items():
        if choice.name == TORCH:
            reasons.setdefault(choice.why, []).append(operator)
    return ", ".join(
        f"{', '.join(operators)} ({why})" if why else ", ".join(operators)
        for why, operators in reasons.items()
    )


def used_parts(device_type: str) -> dict[str, str]:
    """Part -> the operator it uses with model.kernels = "auto"; with "reference", always its plain form."""
    choice = choose_kernels("auto", device_type)
    return {
        name: part.compiled
        if choice.name == "fused" and hasattr(torch.ops.megalite, part.operator)
        else part.reference
        for name, part in PARTS.items()
    }
