"""Gated activations, and bias + GELU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import liger
from megalite.ops.activations import Approximate
from megalite.ops.choice import COMPILED, Operators
from megalite.selftest.norms import ROWS, rows
from megalite.selftest.registry import Candidate, Entry, Form, Shape, Workload, compiled

_GATED_ROWS: tuple[Shape, ...] = ((1, 8), (5, 34), (3, 130), (64, 256))


def _used_by(activation: str, *, gated: bool) -> Callable[[Workload], Shape | None]:
    def own(run: Workload) -> Shape | None:
        if run.gated != gated or run.hidden_act != activation:
            return None
        return run.tokens, run.intermediate_size * (2 if gated else 1)

    return own


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_geglu(gate_up: Tensor, approximate: Approximate) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def plain_bias_gelu(x: Tensor, bias: Tensor, approximate: Approximate) -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def _geglu(operators: Operators, approximate: Approximate) -> Form:
    return partial(operators.glu.geglu, approximate=approximate)


class _ProductWithBias(torch.autograd.Function):
    """Stand for a linear that adds the bias in its product: x has it already, and backward sums its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.sum(dim=0)


def _bias_gelu(operators: Operators, approximate: Approximate) -> Form:
    """Return the form with the bias where the model's block adds it: in the activation, or in the linear before."""
    activate = partial(operators.bias_gelu.activate, approximate=approximate)
    if operators.bias_gelu.adds_bias:
        return activate
    return lambda x, bias: activate(_ProductWithBias.apply(x, bias), None)


_GELUS: tuple[tuple[Approximate, str], ...] = (("none", "gelu"), ("tanh", "gelu_pytorch_tanh"))

ENTRIES = [
    Entry(
        name="SwiGLU",
        operator="glu",
        make=rows(1, 0),
        plain=plain_swiglu,
        form_of=lambda operators: operators.glu.swiglu,
        candidates={
            COMPILED: compiled("glu", "glu_backward"),
            liger.LIGER: Candidate(liger.why_not),
        },
        gradients=1,
        shapes=_GATED_ROWS,
        own=_used_by("silu", gated=True),
    ),
    *(
        Entry(
            name="GeGLU" if approximate == "none" else "GeGLU (tanh)",
            operator="glu",
            make=rows(1, 0),
            plain=partial(plain_geglu, approximate=approximate),
            form_of=partial(_geglu, approximate=approximate),
            candidates={COMPILED: compiled("glu", "glu_backward")},
            gradients=1,
            shapes=_GATED_ROWS,
            own=_used_by(activation, gated=True),
        )
        for approximate, activation in _GELUS
    ),
    *(
        Entry(
            name="bias + GELU" if approximate == "none" else "bias + GELU (tanh)",
            operator="bias_gelu",
            make=rows(1, 1),
            plain=partial(plain_bias_gelu, approximate=approximate),
            form_of=partial(_bias_gelu, approximate=approximate),
            candidates={COMPILED: compiled("bias_gelu", "bias_gelu_backward")},
            gradients=2,
            shapes=ROWS,
            own=_used_by(activation, gated=False),
        )
        for approximate, activation in _GELUS
    ),
]
