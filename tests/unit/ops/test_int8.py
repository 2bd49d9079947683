"""int8 weights: half a step a value, and products against those of the dequantised weight."""

import pytest
import torch
from torch import Tensor

from megalite.ops.linear import LARGEST, dequantised, int8_linear, quantise_rows
from tests.support.parity import BF16_RTOL, FLOAT32_RTOL, assert_close


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_moves_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    weight = drawn(300, 70) * torch.logspace(-6, 3, 300).unsqueeze(1)
    weight[7] = 0
    values, scale = quantise_rows(weight.to(dtype), dtype)
    assert (values.dtype, scale.dtype, scale.shape) == (torch.int8, dtype, (300, 1))
    found = dequantised(values, scale.double(), torch.float64)
    steps = (found - weight.to(dtype).double()).abs() / scale.double()
    assert steps.max() <= 0.5 * (1 + 1e-6) and values.abs().amax(dim=1).max() == LARGEST
    assert not found[7].any() and not (values == -128).any()


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, FLOAT32_RTOL), (torch.bfloat16, BF16_RTOL)])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("size", [(64, 96), (51, 32), (24, 172), (9, 8)], ids=str)
def test_the_product_is_that_of_the_dequantised_weight(
    dtype: torch.dtype, rtol: float, rows: int, size: tuple[int, int]
) -> None:
    values, scale = quantise_rows(drawn(*size), torch.bfloat16)
    inputs = drawn(2, rows, size[1], seed=1).to(dtype)[:1]
    expected = inputs.double() @ dequantised(values, scale.double(), torch.float64).t()
    assert_close(int8_linear(inputs, values, scale.float()), expected, rtol=rtol)


def test_on_other_devices_the_weight_is_dequantised() -> None:
    weight, scale = torch.empty(8, 64, dtype=torch.int8, device="meta"), torch.empty(8, 1, device="meta")
    inputs = torch.empty(1, 3, 64, device="meta")
    assert int8_linear(inputs, weight, scale).shape == (1, 3, 8)
