"""Time of an update on a CPU: norm, clipping, AdamW and the bf16 copy, by torch and by the compiled operators.

    python -m benchmarks.kernels_optimizer [--quick]

16 weights of 1024 x 1024. "as before" is the step of train/optimizer.py without compiled operators: the norm of each
gradient, the gradients cast where they are of 16 bits, scaled in place, torch's fused AdamW, the weights rounded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.kernel_timing import Case, run
from megalite.ops.adamw import (
    AdamWRule,
    AdamWTensors,
    compiled_accumulate_,
    compiled_adamw_,
    compiled_sum_of_squares,
    sum_of_squares,
)

COUNT, SIDE = 16, 1024
RULES: dict[str, Any] = {
    "learning_rate": 1e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "gradient_scale": 0.999,
}


def _update(gradient: torch.dtype, copy: torch.dtype | None) -> Mapping[str, Callable[[], Any]]:
    weights = [torch.randn(SIDE, SIDE) for _ in range(COUNT)]
    gradients = [torch.randn(SIDE, SIDE).to(gradient) for _ in range(COUNT)]
    copies = [each.to(copy) for each in weights] if copy else []
    moments = [[torch.zeros(SIDE, SIDE) for _ in range(COUNT)] for _ in range(2)]
    counts = [torch.tensor(3.0) for _ in range(COUNT)]

    def before() -> None:
        sum_of_squares(gradients)
        wide = [each.float() for each in gradients]
        torch._foreach_mul_(wide, RULES["gradient_scale"])
        torch._fused_adamw_(
            weights,
            wide,
            *moments,
            [],
            counts,
            lr=RULES["learning_rate"],
            beta1=RULES["betas"][0],
            beta2=RULES["betas"][1],
            weight_decay=RULES["weight_decay"],
            eps=RULES["eps"],
            amsgrad=False,
            maximize=False,
        )
        for each, weight in zip(copies, weights, strict=bool(copies)):
            each.copy_(weight)

    def fused() -> None:
        compiled_sum_of_squares(gradients)
        compiled_adamw_(AdamWTensors(weights, copies, gradients, *moments), AdamWRule(**RULES, step=3))

    return {"fused": fused, "as before": before}


def _norm(dtype: torch.dtype) -> Mapping[str, Callable[[], Any]]:
    gradients = [torch.randn(SIDE, SIDE).to(dtype) for _ in range(COUNT)]
    return {
        "fused": lambda: compiled_sum_of_squares(gradients),
        "as before": lambda: sum_of_squares(gradients),
    }


def _accumulate(dtype: torch.dtype) -> Mapping[str, Callable[[], Any]]:
    total, gradient = torch.zeros(4 * SIDE, SIDE), torch.randn(4 * SIDE, SIDE).to(dtype)
    return {
        "fused": lambda: compiled_accumulate_(total, gradient),
        "as before": lambda: total.add_(gradient.float()),
    }


CASES = [
    Case("update, float32", lambda: _update(torch.float32, None)),
    Case("update, float32 gradients, bfloat16 copies", lambda: _update(torch.float32, torch.bfloat16)),
    Case("update, bfloat16 gradients and copies", lambda: _update(torch.bfloat16, torch.bfloat16)),
    Case("update, float16 gradients and copies", lambda: _update(torch.float16, torch.float16)),
    Case("norm, float32", lambda: _norm(torch.float32)),
    Case("norm, bfloat16", lambda: _norm(torch.bfloat16)),
    Case("accumulate bfloat16 in float32", lambda: _accumulate(torch.bfloat16)),
]

if __name__ == "__main__":
    run("kernels-optimizer", __doc__, CASES)
