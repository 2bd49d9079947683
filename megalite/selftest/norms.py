"""Norms, alone and fused with the residual add."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import liger, norms
from megalite.ops.choice import COMPILED
from megalite.selftest.registry import Candidate, Entry, Form, Make, Shape, Workload, compiled

EPS = 1e-6
ROWS: tuple[Shape, ...] = ((1, 8), (5, 33), (3, 130), (64, 256))
_NEEDS = ("norm", "norm_backward")


def rows(tensors: int, weights: int) -> Make:
    """Return a maker of inputs: `tensors` of [rows, columns], then `weights` vectors [columns]."""

    def make(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
        return [*(random(*shape) for _ in range(tensors)), *(random(shape[-1]) for _ in range(weights))]

    return make


def _hidden_states(norm: str) -> Callable[[Workload], Shape | None]:
    return lambda run: (run.tokens, run.hidden_size) if run.norm == norm else None


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def plain_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, plain_rms_norm(total, weight)


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def plain_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, plain_layer_norm(total, weight, bias)


def _one_node(x: Tensor, weight: Tensor) -> Tensor:
    return norms.rms_norm(x, weight, EPS)


def _add_one_node(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, norms.rms_norm(total, weight, EPS)


def _entry(name: str, inputs: tuple[int, int], plain: Form, form: Form, **more: Any) -> Entry:
    """Return the entry of a norm. inputs: tensors [rows, columns], vectors. form: compiled. more: further fields."""
    tensors, weights = inputs
    return Entry(
        name=name,
        operator="norm" if tensors == 1 else "add_norm",
        make=rows(tensors, weights),
        plain=plain,
        candidates={COMPILED: compiled(form, *_NEEDS), **more.pop("candidates", {})},
        gradients=tensors + weights,
        shapes=ROWS,
        own=_hidden_states("rms_norm" if weights == 1 else "layer_norm"),
        **more,
    )


ENTRIES = [
    _entry(
        "RMSNorm",
        (1, 1),
        plain_rms_norm,
        lambda x, weight: norms.compiled_norm(x, weight, None, EPS),
        torch={"one autograd node": _one_node},
        candidates={
            liger.LIGER: Candidate(lambda x, weight: liger.norm(x, weight, None, EPS), liger.why_not)
        },
    ),
    _entry(
        "add + RMSNorm",
        (2, 1),
        plain_add_rms_norm,
        lambda x, residual, weight: norms.compiled_add_norm(x, residual, weight, None, EPS),
        torch={"one autograd node": _add_one_node},
    ),
    _entry(
        "LayerNorm",
        (1, 2),
        plain_layer_norm,
        lambda x, weight, bias: norms.compiled_norm(x, weight, bias, EPS),
    ),
    _entry(
        "add + LayerNorm",
        (2, 2),
        plain_add_layer_norm,
        lambda x, residual, weight, bias: norms.compiled_add_norm(x, residual, weight, bias, EPS),
    ),
]
