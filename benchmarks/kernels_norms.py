"""Residual add and norm: our compiled operator against eager torch, torch.compile and our own plain form.

    python -m benchmarks.kernels_norms [--quick]

4096 tokens of 1024 values in float32 on two threads, in new memory as in a training step. "forward + backward" has
gradients of the sum and of the norm come in, and those of x, the residual, the weight and the bias go out.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_timing import Case, run
from megalite.ops.norms import compiled_add_norm, norm

ROWS, COLUMNS, EPS = 4096, 1024, 1e-5
Norm = Callable[..., tuple[Tensor, Tensor]]


def _eager_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, F.rms_norm(total, weight.shape, weight, EPS)


def _eager_layer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, F.layer_norm(total, weight.shape, weight, bias, EPS)


def _plain_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, norm(total, weight, None, EPS)


def _plain_layer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, norm(total, weight, bias, EPS)


def _fused(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return compiled_add_norm(x, residual, weight, bias, EPS)


def _forms(eager: Norm, plain: Norm, *, parameters: int, backward: bool) -> Mapping[str, Callable[[], Any]]:
    leaves = [torch.randn(ROWS, COLUMNS) for _ in range(2)] + [
        torch.randn(COLUMNS) for _ in range(parameters)
    ]
    grads = [torch.randn(ROWS, COLUMNS) for _ in range(2)]
    for leaf in leaves:
        leaf.requires_grad_(backward)

    def once(norm: Norm) -> Any:
        outputs = norm(*leaves)
        return torch.autograd.grad(outputs, leaves, grads) if backward else outputs

    forms = {"eager": eager, "compiled": torch.compile(eager), "plain": plain, "fused": _fused}
    return {name: partial(once, norm) for name, norm in forms.items()}


RMS = partial(_forms, _eager_rms, _plain_rms, parameters=1)
LAYER = partial(_forms, _eager_layer, _plain_layer, parameters=2)
CASES = [
    Case("add + RMSNorm, forward + backward", partial(RMS, backward=True), {"eager": 4.0, "compiled": 2.0}),
    Case("add + RMSNorm, forward", partial(RMS, backward=False)),
    Case(
        "add + LayerNorm, forward + backward", partial(LAYER, backward=True), {"eager": 1.6, "compiled": 2.0}
    ),
    Case("add + LayerNorm, forward", partial(LAYER, backward=False)),
]

if __name__ == "__main__":
    run("kernels-norms", __doc__, CASES)
