"""How far two tensors are apart, and how far two correct runs may be.

A relative error is the largest difference over the largest magnitude of the reference tensor: elements that are small
by cancellation carry the rounding errors of the large ones.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Layouts against one process, in float64: only the order of sums differs.
LAYOUT_RTOL = 1e-10
# ZeRO's master weights are float32 for float64 models too. A bias that began at zero is a sum of gradients, and the
# second gradient comes from rounded weights: an expert's bias was 1.03e-6 off.
ZERO_RTOL = 3e-6
# Training in float32: twenty AdamW steps of another layout, or another implementation with the same weights.
FLOAT32_RTOL = 1e-5
# Gradients in float32 against another program's: the terms of a norm's gradient cancel, and processors round them
# differently (1.5e-5 on one with AVX-512). Losses behind 2048 positions, whose angles the other program rounds.
FLOAT32_GRADIENT_RTOL = 3e-5
# bf16 and fp16, in addition to three times the error of one process in the same type: one rounding step of bf16, two of
# fp16 (on a processor with AMX a norm was 9.1e-4 off, that of one process by chance only 1.4e-4).
NARROW_FLOOR = {"bf16": 2**-8, "fp16": 2**-10}
# A tensor whose values are below this, relative to the largest tensor, consists of cancelled sums: rounding noise.
NOISE = 1e-6


def layout_bound(precision: str, zero_stage: int) -> float:
    """Return the tolerance of a run in fp64 or fp32 against one process, of every quantity of a few steps.

    DeepSpeed holds gradient sums and master weights in float32.
    """
    exact = LAYOUT_RTOL if precision == "fp64" else FLOAT32_RTOL
    return max(exact, ZERO_RTOL if zero_stage else 0.0)


def narrow_bound(precision: str, own_error: float) -> float:
    """Return the tolerance of a bf16 or fp16 run, given the error `own_error` of one process in the same type.

    Both errors are draws of the same noise, so the other may be larger: correct runs had up to 2.1 times `own_error`.
    """
    return 3 * own_error + NARROW_FLOOR[precision]


def relative_error(actual: Any, expected: Any, *, floor: float = 0.0) -> float:
    """Return the largest difference over the largest magnitude (at least `floor`) of `expected`; inf if not finite.

    Takes tensors, numbers and sequences of numbers, of one shape; compares in float64.
    """
    # Python floats are float64; as_tensor without a dtype would round them to float32.
    actual, expected = (
        torch.as_tensor(values, dtype=torch.float64).detach() for values in (actual, expected)
    )
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0
    difference = (actual - expected).abs().max().item()
    if difference == 0:
        return 0.0
    magnitude = max(expected.abs().max().item(), floor)
    # Comparisons with NaN are false, so NaN counts as not finite too.
    return difference / magnitude if magnitude > 0 and difference < float("inf") else float("inf")


def magnitudes(expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return by what to measure the errors of each tensor: its largest magnitude.

    A tensor that is zero up to rounding (the gradient of a key's bias) is measured relative to the largest tensor.
    """
    sizes = {name: tensor.abs().max().item() if tensor.numel() else 0.0 for name, tensor in expected.items()}
    largest = max(sizes.values(), default=0.0)
    return {name: largest if size < NOISE * largest < float("inf") else size for name, size in sizes.items()}
