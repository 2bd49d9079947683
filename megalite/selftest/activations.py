"""Gated activations, and bias + GELU."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from megalite.ops import liger
from megalite.ops.activations import (
    Approximate,
    compiled_bias_gelu,
    compiled_geglu,
    compiled_swiglu,
    swiglu,
)
from megalite.ops.choice import COMPILED
from megalite.selftest.norms import ROWS, rows
from megalite.selftest.registry import Candidate, Entry, Shape, Workload, compiled

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


_GELUS: tuple[tuple[Approximate, str], ...] = (("none", "gelu"), ("tanh", "gelu_pytorch_tanh"))

ENTRIES = [
    Entry(
        name="SwiGLU",
        operator="glu",
        make=rows(1, 0),
        plain=plain_swiglu,
        torch={"one autograd node": swiglu},
        candidates={
            COMPILED: compiled(compiled_swiglu, "glu", "glu_backward"),
            liger.LIGER: Candidate(liger.swiglu, liger.why_not),
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
            candidates={
                COMPILED: compiled(partial(compiled_geglu, approximate=approximate), "glu", "glu_backward")
            },
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
            candidates={
                COMPILED: compiled(
                    partial(compiled_bias_gelu, approximate=approximate), "bias_gelu", "bias_gelu_backward"
                )
            },
            gradients=2,
            shapes=ROWS,
            own=_used_by(activation, gated=False),
        )
        for approximate, activation in _GELUS
    ),
]
