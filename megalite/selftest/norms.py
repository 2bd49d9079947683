"""Norms, alone and fused with the residual add."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import liger
from megalite.ops.choice import COMPILED, Operators
from megalite.selftest.registry import Candidate, Entry, Form, Make, Shape, Workload, compiled, overwritable

EPS = 1e-6
ROWS: tuple[Shape, ...] = ((1, 8), (5, 33), (3, 130), (64, 256))


def rows(tensors: int, weights: int) -> Make:
    """Return a maker of inputs: `tensors` of [rows, columns], then `weights` vectors [columns]."""

    def make(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
        return [*(random(*shape) for _ in range(tensors)), *(random(shape[-1]) for _ in range(weights))]

    return make


def _hidden_states(norm: str) -> Callable[[Workload], Shape | None]:
    return lambda run: (run.tokens, run.hidden_size) if run.norm == norm else None


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, EPS)
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def plain_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, plain_norm(total, weight, bias)


def _norm(operators: Operators) -> Form:
    return lambda x, weight, bias=None: operators.norm(x, weight, bias, EPS, False)


def _add_norm(operators: Operators) -> Form:
    return lambda x, residual, weight, bias=None: operators.add_norm(
        overwritable(x), residual, weight, bias, EPS, False
    )


def _entry(name: str, tensors: int, weights: int) -> Entry:
    """Return the entry of a norm. tensors: inputs [rows, columns]; weights: one for RMSNorm, two for LayerNorm."""
    candidates = {COMPILED: compiled("norm", "norm_backward")}
    if weights == 1:
        candidates[liger.LIGER] = Candidate(liger.why_not)
    return Entry(
        name=name,
        operator="norm" if tensors == 1 else "add_norm",
        make=rows(tensors, weights),
        plain=plain_norm if tensors == 1 else plain_add_norm,
        form_of=_norm if tensors == 1 else _add_norm,
        candidates=candidates,
        gradients=tensors + weights,
        shapes=ROWS,
        own=_hidden_states("rms_norm" if weights == 1 else "layer_norm"),
    )


ENTRIES = [
    _entry("RMSNorm", 1, 1),
    _entry("add + RMSNorm", 2, 1),
    _entry("LayerNorm", 1, 2),
    _entry("add + LayerNorm", 2, 2),
]
