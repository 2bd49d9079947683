"""The comparisons and their tolerances; a test brings none of its own.

A relative error is the largest difference over the largest magnitude of the reference tensor: elements that
are small by cancellation carry the rounding errors of the large ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Layouts against one process, in float64: the order of the sums is all that differs.
LAYOUT_RTOL = 1e-10
# ZeRO's master weights are float32 whatever the model's type.
ZERO_RTOL = 1e-6
# Training in float32: twenty AdamW steps of another layout, or another implementation with the same weights.
FLOAT32_RTOL = 1e-5
# 16-bit types, beside three times the error of one process in the same type: one of their rounding steps.
NARROW_FLOOR = {"bf16": 2**-8, "fp16": 2**-11}
# Copies of one tensor on several ranks, which compute it from the same values.
COPIES_RTOL = 1e-9


def layout_bounds(precision: str, zero_stage: int) -> dict[str, float]:
    """How far a run in fp64 or fp32 may be from one process, for each quantity of a few steps.

    gradients are the first step's; DeepSpeed holds its sums of them in float32, as it does its master weights.
    """
    exact = LAYOUT_RTOL if precision == "fp64" else FLOAT32_RTOL
    bound = max(exact, ZERO_RTOL if zero_stage else 0.0)
    return dict.fromkeys(("losses", "norms", "gradients", "weights"), bound)


# Beside a tensor with values of 1, one with values below this is sums that cancel.
_NOISE = 1e-6


def narrow_bound(precision: str, own_error: float) -> float:
    """How far a 16-bit run may be from the exact one, where one process in the same type is off by `own_error`.

    Two draws of the same noise, of which one process's may be the smaller: 2.1 times of it was seen in right runs.
    """
    return 3 * own_error + NARROW_FLOOR[precision]


def relative_error(actual: Any, expected: Any, *, floor: float = 0.0) -> float:
    """The largest difference over the largest magnitude (at least `floor`) of `expected`; inf if not finite.

    Takes tensors, numbers and sequences of numbers, of one shape; compares in float64.
    """
    # Python's numbers are float64; as_tensor alone would round them to float32.
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
    # A comparison with nan is false, so nan counts as not finite too.
    return difference / magnitude if magnitude > 0 and difference < float("inf") else float("inf")


def assert_close(actual: Any, expected: Any, *, rtol: float = LAYOUT_RTOL, what: str = "values") -> None:
    """The relative error is at most `rtol`; 0 asks for equality."""
    error = relative_error(actual, expected)
    assert error <= rtol, f"{what}: relative error {error:.2e}, allowed {rtol:.0e}"


def tensor_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative error of each tensor of `expected`.

    One that is zero but for rounding (the gradient of a key's bias) is measured by the largest of the others.
    """
    sizes = {name: tensor.abs().max().item() if tensor.numel() else 0.0 for name, tensor in expected.items()}
    largest = max(sizes.values(), default=0.0)
    zeros = {name for name, size in sizes.items() if size < _NOISE * largest < float("inf")}
    return {
        name: relative_error(actual[name], tensor, floor=largest if name in zeros else 0.0)
        for name, tensor in expected.items()
    }


def assert_same_tensors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, rtol: float = LAYOUT_RTOL
) -> None:
    """The same names, and each tensor within `rtol` (of `tensor_errors`); the message names the worst."""
    assert actual.keys() == expected.keys(), f"names differ: {sorted(actual.keys() ^ expected.keys())}"
    errors = tensor_errors(actual, expected)
    wrong = {name: error for name, error in errors.items() if not error <= rtol}
    if wrong:
        worst = max(wrong, key=wrong.__getitem__)
        raise AssertionError(
            f"{len(wrong)} of {len(errors)} tensors differ, {worst} the most: "
            f"relative error {wrong[worst]:.2e}, allowed {rtol:.0e}"
        )


def assert_same_curve(values: Sequence[float], golden: Sequence[float], *, rtol: float = 0.0) -> None:
    """The same number for every step, to the bit unless `rtol` is given; names the first that differs."""
    assert len(values) == len(golden), f"{len(values)} steps, expected {len(golden)}"
    for step, (value, expected) in enumerate(zip(values, golden, strict=True), start=1):
        error = relative_error(value, expected)
        assert error <= rtol, f"step {step}: {value!r}, expected {expected!r} (relative error {error:.2e})"


def assert_as_accurate_as(fused: Tensor, naive: Tensor, reference: Tensor, *, what: str = "values") -> None:
    """`fused` errs at most twice as much as the plain implementation `naive` in the same type.

    reference: the same computed in a higher precision (the rule of flash-attention's tests).
    """
    assert fused.dtype == naive.dtype, f"{what}: {fused.dtype} is not compared with {naive.dtype}"
    error, allowed = relative_error(fused, reference), 2 * relative_error(naive, reference)
    assert error <= allowed, f"{what}: relative error {error:.2e}, allowed {allowed:.2e}"
