"""The comparisons that the other tests rest on can tell right from wrong."""

import pytest
import torch

from tests.support.parity import (
    LAYOUT_RTOL,
    assert_as_accurate_as,
    assert_close,
    assert_same_curve,
    assert_same_tensors,
    relative_error,
)


def test_the_error_is_relative_to_the_largest_magnitude() -> None:
    assert relative_error(torch.tensor([100.0, 0.5]), torch.tensor([100.0, 0.0])) == pytest.approx(0.005)


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


def test_a_kernel_may_err_twice_as_much_as_the_plain_implementation() -> None:
    reference = torch.tensor([1.0])
    assert_as_accurate_as(torch.tensor([1.0625]), torch.tensor([0.96875]), reference)
    with pytest.raises(AssertionError):
        assert_as_accurate_as(torch.tensor([1.125]), torch.tensor([0.96875]), reference)
