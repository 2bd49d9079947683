"""The table of operators that the GPU suite checks and times: one entry each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import norms
from megalite.ops.adamw import accumulate_, adamw_, sum_of_squares

Shape = tuple[int, ...]
Form = Callable[..., Any]
WIDE, NARROW = (torch.float32, torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operator:
    """One operator: what goes in, its forms, and what it has to move or to compute.

    make(shape, dtype, random): inputs, where random(*sizes) draws a tensor of that type; the first `gradients` of them
    are differentiated. fused, plain: functions of these that return a tensor or several, and may overwrite inputs;
    plain in float64 is the reference. peers: name -> another form to time beside it. needs: registered operators.
    shapes: what is checked, tiny. timed: the shape of the measurement. bytes, flops: (shape, bytes of an element) ->
    those of a forward and of a backward, each input read and each output written once. targets: the shares of the
    ceiling that a forward and a backward are to reach.
    """

    name: str
    needs: tuple[str, ...]
    make: Callable[[Shape, torch.dtype, Form], Sequence[Tensor]]
    fused: Form
    plain: Form
    shapes: tuple[Shape, ...]
    timed: Shape
    gradients: int = 0
    dtypes: tuple[torch.dtype, ...] = WIDE
    peers: Mapping[str, Form] = field(default_factory=dict)
    compiled: bool = True
    bytes: Callable[[Shape, int], tuple[float, float]] | None = None
    flops: Callable[[Shape, int], tuple[float, float]] | None = None
    targets: tuple[float, float] = (0.8, 0.75)

    def missing(self) -> list[str]:
        """Those of `needs` that this library does not have."""
        return [name for name in self.needs if not hasattr(torch.ops.megalite, name)]


EPS = 1e-6
ROWS: tuple[Shape, ...] = ((1, 8), (5, 33), (3, 130), (64, 256))
LARGE_ROWS: Shape = (16384, 4096)


def _rows(tensors: int, weights: int) -> Callable[[Shape, torch.dtype, Form], list[Tensor]]:
    """Inputs [rows, columns], then vectors [columns]."""

    def make(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
        return [*(random(*shape) for _ in range(tensors)), *(random(shape[-1]) for _ in range(weights))]

    return make


def _passes(forward: float, backward: float) -> Callable[[Shape, int], tuple[float, float]]:
    """How many times a tensor of the whole shape goes through memory."""
    return lambda shape, size: (forward * shape[0] * shape[1] * size, backward * shape[0] * shape[1] * size)


def _plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _plain_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _plain_rms_norm(total, weight)


def _plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _plain_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _plain_layer_norm(total, weight, bias)


NORMS = [
    Operator(
        name="RMSNorm",
        needs=("norm", "norm_backward"),
        make=_rows(1, 1),
        fused=lambda x, weight: norms.rms_norm(x, weight, EPS, fused=True),
        plain=_plain_rms_norm,
        peers={"F.rms_norm": _plain_rms_norm},
        gradients=2,
        shapes=ROWS,
        timed=LARGE_ROWS,
        bytes=_passes(2, 3),
        targets=(0.85, 0.75),
    ),
    Operator(
        name="add + RMSNorm",
        needs=("norm", "norm_backward"),
        make=_rows(2, 1),
        fused=lambda x, residual, weight: norms.fused_add_norm(x, residual, weight, None, EPS),
        plain=_plain_add_rms_norm,
        peers={"x + r, F.rms_norm": _plain_add_rms_norm},
        gradients=3,
        shapes=ROWS,
        timed=LARGE_ROWS,
        bytes=_passes(4, 4),
        targets=(0.85, 0.75),
    ),
    Operator(
        name="LayerNorm",
        needs=("norm", "norm_backward"),
        make=_rows(1, 2),
        fused=lambda x, weight, bias: norms.layer_norm(x, weight, bias, EPS, fused=True),
        plain=_plain_layer_norm,
        peers={"F.layer_norm": _plain_layer_norm},
        gradients=3,
        shapes=ROWS,
        timed=LARGE_ROWS,
        bytes=_passes(2, 3),
        targets=(0.85, 0.75),
    ),
    Operator(
        name="add + LayerNorm",
        needs=("norm", "norm_backward"),
        make=_rows(2, 2),
        fused=lambda x, residual, weight, bias: norms.fused_add_norm(x, residual, weight, bias, EPS),
        plain=_plain_add_layer_norm,
        peers={"x + r, F.layer_norm": _plain_add_layer_norm},
        gradients=4,
        shapes=ROWS,
        timed=LARGE_ROWS,
        bytes=_passes(4, 4),
        targets=(0.85, 0.75),
    ),
]


RULES: dict[str, Any] = {
    "learning_rate": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 7,
}
# Lists of tensors are drawn as (tensors, elements of each).
LISTS: tuple[Shape, ...] = ((1, 1), (3, 8193), (90, 5), (2, 4099))


def _make_update(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Weights of float32, poisoned copies and gradients of `dtype`, moments."""
    count, size = shape
    weights, gradients = ([random(size) for _ in range(count)] for _ in range(2))
    copies = [torch.full_like(each, torch.nan) for each in gradients]
    means, squares = ([torch.rand_like(each.float()) for each in gradients] for _ in range(2))
    return [*(each.float() for each in weights), *copies, *gradients, *means, *squares]


def _update(fused: bool, scale: float = 0.5) -> Form:
    def form(*tensors: Tensor) -> list[Tensor]:
        count = len(tensors) // 5
        weights, copies, gradients, means, squares = (
            [*tensors[start : start + count]] for start in range(0, len(tensors), count)
        )
        narrow = copies if copies[0].element_size() < 4 else []
        adamw_(weights, narrow, gradients, means, squares, **RULES, gradient_scale=scale, fused=fused)
        return [*weights, *(narrow or [each.clone() for each in weights]), *means, *squares]

    return form


OPTIMIZER = [
    Operator(
        name="AdamW, float32 masters and 16-bit copies",
        needs=("adamw_",),
        make=_make_update,
        fused=_update(fused=True),
        plain=_update(fused=False),
        peers={"scale, AdamW fused, copy": _update(fused=False)},
        compiled=False,
        dtypes=NARROW,
        shapes=LISTS,
        timed=(64, 1 << 22),
        # Weight and moments are read and written, a gradient of 16 bits is read, a copy is written.
        bytes=lambda shape, size: (shape[0] * shape[1] * (6 * 4 + 2 * size), 0),
        targets=(0.85, 0),
    ),
    Operator(
        name="sum of squares",
        needs=("sum_of_squares",),
        make=lambda shape, dtype, random: [random(shape[1]) for _ in range(shape[0])],
        fused=lambda *tensors: sum_of_squares(tensors, fused=True),
        plain=lambda *tensors: sum_of_squares(tensors),
        peers={"a norm for each tensor": lambda *tensors: sum_of_squares(tensors)},
        compiled=False,
        shapes=LISTS,
        timed=(64, 1 << 23),
        bytes=lambda shape, size: (shape[0] * shape[1] * size, 0),
        targets=(0.85, 0),
    ),
    Operator(
        name="gradients summed in float32",
        needs=("accumulate_",),
        make=lambda shape, dtype, random: [random(*shape).float(), random(*shape)],
        fused=lambda total, gradient: (accumulate_(total, gradient, fused=True), total)[1],
        plain=lambda total, gradient: (accumulate_(total, gradient), total)[1],
        peers={"cast, then add": lambda total, gradient: total.add_(gradient.float())},
        compiled=False,
        dtypes=NARROW,
        shapes=ROWS,
        timed=LARGE_ROWS,
        bytes=lambda shape, size: (shape[0] * shape[1] * (8 + size), 0),
        targets=(0.85, 0),
    ),
]

OPERATORS: list[Operator] = [*NORMS, *OPTIMIZER]
