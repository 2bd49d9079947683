"""The comparisons that the other tests rest on can tell right from wrong."""

import pytest
import torch

from tests.support.parity import (
    LAYOUT_RTOL,
    about,
    assert_close,
    assert_mean,
    assert_no_worse,
    assert_rounded_alike,
    assert_same_curve,
    assert_same_tensors,
    relative_error,
)


def test_the_error_is_relative_to_the_largest_magnitude() -> None:
    assert relative_error(torch.tensor([100.0, 0.5]), torch.tensor([100.0, 0.0])) == about(0.005)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["actual", "expected"])
def test_what_is_not_finite_is_never_close(value: float, place: str) -> None:
    pair = {"actual": [1.0, 2.0], "expected": [1.0, 2.0]} | {place: [1.0, value]}
    assert relative_error(**pair) == float("inf")


def test_numbers_are_compared_in_float64() -> None:
    assert_close(1.0 + 0.9 * LAYOUT_RTOL, 1.0)
    with pytest.raises(AssertionError, match="loss: relative error"):
        assert_close(1.0 + 1.1 * LAYOUT_RTOL, 1.0, what="loss")


def test_shapes_must_be_equal() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(2, 1), torch.ones(2))


def test_a_zero_reference_allows_zero_only() -> None:
    assert_close(torch.zeros(2), torch.zeros(2))
    assert relative_error(torch.tensor([0.0, 1e-30]), torch.zeros(2)) == float("inf")


def test_the_worst_tensor_is_named() -> None:
    expected = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    actual = {"a": torch.ones(2), "b": torch.full((2,), 1.5), "c": torch.full((2,), 1.1)}
    with pytest.raises(AssertionError, match="2 of 3 tensors differ, b the most"):
        assert_same_tensors(actual, expected)
    with pytest.raises(AssertionError, match=r"names differ: \['c'\]"):
        assert_same_tensors({"a": torch.ones(2), "b": torch.ones(2)}, expected)


def test_curves_are_equal_to_the_bit() -> None:
    assert_same_curve([1.0, 2.0], [1.0, 2.0])
    with pytest.raises(AssertionError, match="step 2"):
        assert_same_curve([1.0, 2.0 + 4e-16], [1.0, 2.0])
    with pytest.raises(AssertionError, match="1 steps, expected 2"):
        assert_same_curve([1.0], [1.0, 2.0])


def test_a_kernel_may_err_twice_as_much_as_the_plain_implementation_and_one_unit() -> None:
    exact, plain = torch.tensor([1.0], dtype=torch.float64), torch.tensor([0.96875])
    assert_no_worse(torch.tensor([1.0625]), plain, exact)
    with pytest.raises(AssertionError, match="of the plain form"):
        assert_no_worse(torch.tensor([1.125]), plain, exact)
    unit = torch.finfo(torch.float32).eps
    for units, approximate in ((1, False), (4, True)):
        assert_no_worse(torch.tensor([1 + units * unit]), exact.float(), exact, approximate=approximate)
        with pytest.raises(AssertionError):
            above = torch.tensor([1 + (units + 1) * unit])
            assert_no_worse(above, exact.float(), exact, approximate=approximate)


def test_another_order_of_sums_may_round_the_other_way() -> None:
    for dtype, units in ((torch.bfloat16, 1), (torch.float32, 16)):
        one, unit = torch.ones(1, dtype=dtype), torch.finfo(dtype).eps
        assert_rounded_alike(one + units * unit, one)
        with pytest.raises(AssertionError):
            assert_rounded_alike(one + (units + 1) * unit, one)


def test_a_mean_has_its_standard_error() -> None:
    draws = torch.randn(10_000, dtype=torch.float64)
    assert_mean(draws, 0.0)
    with pytest.raises(AssertionError, match="the mean of draws is"):
        assert_mean(draws, 0.06, what="draws")


def test_figures_are_compared_one_by_one() -> None:
    assert about([1.0 + 1e-7, 1e-9]) == [1.0, 1e-9]
    assert about([1.0, 2.0 + 1e-5]) != [1.0, 2.0]
    assert about(1.01, 0.02) == 1.0
