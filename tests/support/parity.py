"""The comparisons and their tolerances; a test brings none of its own.

Those of whole runs are the ones of `megalite verify` (megalite/verify/measure.py).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.verify.measure import FLOAT32_GRADIENT_RTOL as FLOAT32_GRADIENT_RTOL
from megalite.verify.measure import FLOAT32_RTOL as FLOAT32_RTOL
from megalite.verify.measure import LAYOUT_RTOL as LAYOUT_RTOL
from megalite.verify.measure import NARROW_FLOOR as NARROW_FLOOR
from megalite.verify.measure import ZERO_RTOL as ZERO_RTOL
from megalite.verify.measure import layout_bound, magnitudes, relative_error
from megalite.verify.measure import narrow_bound as narrow_bound

# Copies of one tensor that several ranks compute from the same values.
COPIES_RTOL = 1e-9
# Two implementations of one operator in float64: only the order of sums differs.
OPERATOR_RTOL = 1e-13
# Gradients by central differences with steps of 1e-6: float64 losses keep ten digits of a difference.
SLOPE_RTOL = 1e-6
# Losses of DeepSpeed's own engine in float32, over a few steps and two conversions.
ENGINE_RTOL = 2e-6
# A bf16 result whose inputs, probabilities and output are each rounded once.
BF16_RTOL = 2**-7
# A float32 value that was rounded once more than the reference.
ROUNDED_RTOL = 2**-24
# Gradients whose hidden states and products are rounded to bf16 or fp16: four rounding steps.
CHUNKED_RTOL = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
# Absolute difference of bf16 or fp16 losses from the same run in float32, and from another ZeRO stage.
NARROW_LOSS, ZERO_NARROW_LOSS = 2e-2, 2e-3
# AdamW divides a gradient by its own size: if the gradient is only rounding noise, the update is noise of full size.
ADAM_UPDATES = 100
# Python floats (times, learning rates, shares) computed by equivalent formulas.
FIGURE_RTOL = 1e-6
# A second since 1970 in a float has steps of 0.24 us, and a traced time is the sum or difference of a few.
STAMP_SECONDS = 2e-6
# Places in a picture, in percent of its width: a tenth of a pixel.
PICTURE_PERCENT = 0.01
# Figures that vendors publish with two or three digits.
PUBLISHED_RTOL = 0.02
# Shares of a peak that papers publish with three digits.
UTILISATION_RTOL = 0.005
# Memory against its formula, which omits small tensors and the padding of partitions.
MEMORY_RTOL = 0.01


def layout_bounds(precision: str, zero_stage: int) -> dict[str, float]:
    """Return the tolerance of a run in fp64 or fp32 against one process, for each quantity of a few steps."""
    return dict.fromkeys(("losses", "norms", "gradients", "weights"), layout_bound(precision, zero_stage))


def tensor_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each tensor of `expected`, measured as `magnitudes` says."""
    by = magnitudes(expected)
    return {name: relative_error(actual[name], tensor, floor=by[name]) for name, tensor in expected.items()}


def assert_close(actual: Any, expected: Any, *, rtol: float = LAYOUT_RTOL, what: str = "values") -> None:
    """Assert that the relative error is at most `rtol`; 0: that the values are equal."""
    error = relative_error(actual, expected)
    assert error <= rtol, f"{what}: relative error {error:.2e}, allowed {rtol:.0e}"


def assert_same_tensors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, rtol: float = LAYOUT_RTOL
) -> None:
    """Assert equal names, and errors of at most `rtol` (`tensor_errors`); the message has the worst tensor."""
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
    """Assert equal numbers in every step, bit for bit unless `rtol` is given; the message has the first difference."""
    assert len(values) == len(golden), f"{len(values)} steps, expected {len(golden)}"
    for step, (value, expected) in enumerate(zip(values, golden, strict=True), start=1):
        error = relative_error(value, expected)
        assert error <= rtol, f"step {step}: {value!r}, expected {expected!r} (relative error {error:.2e})"


def assert_no_worse(
    fused: Tensor, plain: Tensor, exact: Tensor, *, what: str = "values", approximate: bool = False
) -> None:
    """Assert that `fused` is about as close to `exact` (float64) as the plain form in the same dtype.

    Allowed: twice the plain form's error plus one unit in the last place of the largest value; in float64, where the
    plain form is `exact` and so its own rounding counts too, which differs between processors, 64 units. approximate:
    three units more in float32, because the PTX ISA allows powers and quotients errors of two units each.
    """
    assert fused.dtype == plain.dtype and fused.shape == plain.shape == exact.shape, what
    if not exact.numel():
        return
    error, allowed = ((each.double() - exact).abs().max().item() for each in (fused, plain))
    units = 64 if fused.dtype == torch.float64 else 1 + 3 * (approximate and fused.dtype == torch.float32)
    unit = torch.finfo(fused.dtype).eps * exact.abs().max().item()
    assert error <= 2 * allowed + units * unit, f"{what}: error {error:.2e}, of the plain form {allowed:.2e}"


def assert_rounded_alike(actual: Tensor, expected: Tensor) -> None:
    """Assert that two implementations with the same intermediate types differ only by the order of sums.

    Allowed: one unit in the last place of the largest value in bf16 and fp16, whose rounding may flip; else 16 units.
    """
    assert actual.dtype == expected.dtype
    units = 16 if actual.element_size() >= 4 else 1
    assert_close(actual, expected, rtol=units * torch.finfo(actual.dtype).eps)


def assert_copies(one: Tensor, other: Tensor, *, what: str) -> None:
    """Assert that two ranks hold the same tensor; a tensor below 1e-5 is noise and measured relative to 1e-5."""
    error = relative_error(one, other, floor=1e-5)
    assert error <= COPIES_RTOL, f"copies of {what} differ: relative error {error:.2e}"


def assert_mean(values: Any, expected: float, *, deviation: float = 1.0, what: str = "values") -> None:
    """Assert that the mean of independent draws with this standard deviation is within four standard errors."""
    values = torch.as_tensor(values, dtype=torch.float64)
    off, allowed = abs(values.mean().item() - expected), 4 * deviation / math.sqrt(values.numel())
    assert off <= allowed, f"the mean of {what} is {off:.2e} off {expected}, allowed {allowed:.2e}"


def about(expected: Any, rtol: float = FIGURE_RTOL) -> Any:
    """Return an approximate value for `==`: a float, or a list or dict of floats, computed by another formula."""
    return pytest.approx(expected, rel=rtol)


def read_off(expected: Any, resolution: float = STAMP_SECONDS) -> Any:
    """Return an approximate value for `==`, as `about`, of a clock or a picture with an absolute resolution."""
    return pytest.approx(expected, rel=FIGURE_RTOL, abs=resolution)
