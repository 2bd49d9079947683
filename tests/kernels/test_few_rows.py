"""Products of a few rows by the compiled operator: no worse than torch's, equal whatever rows stand beside."""

import pytest
import torch
from torch import Tensor

from megalite.ops.linear import compiled_pays, dequantised, few_rows_linear, quantise_rows
from tests.support.kernels import DTYPES, needs_library
from tests.support.parity import FLOAT32_RTOL, assert_close, assert_no_worse

pytestmark = needs_library
GENERATOR = torch.Generator().manual_seed(5)
# [out, in]: whole vectors and blocks of outputs, and rests of both.
SIZES = [(64, 96), (7, 5), (33, 100), (4, 16), (130, 1031)]
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def _compiled(*tensors: Tensor) -> Tensor:
    product: Tensor = torch.ops.megalite.few_rows_linear(*tensors)
    return product


@sizes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16])
def test_products(size: tuple[int, int], dtype: torch.dtype, rows: int) -> None:
    inputs, weight = _random(rows, size[1]).to(dtype), _random(*size).to(dtype)
    exact = inputs.double() @ weight.double().t()
    assert_no_worse(_compiled(inputs, weight), inputs @ weight.t(), exact, what="product")


@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights(size: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = _random(3, size[1]).to(dtype)
    weight, scale = quantise_rows(_random(*size).float(), torch.float32)
    exact = inputs.double() @ dequantised(weight, scale.double(), torch.float64).t()
    if dtype == torch.float32:
        assert_close(_compiled(inputs, weight, scale), exact, rtol=FLOAT32_RTOL)
    rounded = dequantised(weight, scale, dtype)
    assert_no_worse(_compiled(inputs, weight, scale), inputs @ rounded.t(), exact, what="product")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_s_product_is_the_same_alone_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    inputs, weight = _random(11, 333).to(dtype), _random(102, 333).to(dtype)
    together, threads = _compiled(inputs, weight), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(_compiled(inputs, weight), together)
    finally:
        torch.set_num_threads(threads)
    for row, alone in zip(together, inputs, strict=True):
        assert torch.equal(_compiled(alone, weight), row)


def test_strided_inputs_and_leading_dimensions() -> None:
    inputs, weight = _random(20, 3, 2).transpose(0, 2), _random(20, 8).t()
    assert_close(_compiled(inputs, weight), inputs @ weight.t(), rtol=FLOAT32_RTOL)


def test_values_that_are_no_numbers_pass_on() -> None:
    inputs, weight = torch.ones(2, 40), torch.ones(6, 40)
    inputs[1, 3], weight[5, 39] = torch.nan, torch.inf
    found = _compiled(inputs, weight)
    assert found[0, :5].eq(40).all() and found[0, 5].isinf() and found[1].isnan().all()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((torch.ones(2, 4), torch.ones(3, 5)), "the weight must be"),
        ((torch.ones(2, 4), torch.ones(3, 4).double()), "another dtype"),
        ((torch.ones(2, 4), torch.ones(3, 4, dtype=torch.int8)), "needs a scale"),
        ((torch.ones(2, 4), torch.ones(3, 4, dtype=torch.int8), torch.ones(2)), "elements"),
    ],
    ids=["size", "type", "no scale", "scale"],
)
def test_wrong_tensors_are_refused(tensors: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        _compiled(*tensors)


def test_only_few_rows_on_a_cpu_use_the_operator() -> None:
    weight = torch.zeros(8, 64)
    for dtype, most in ((torch.float32, 16), (torch.float64, 16), (torch.bfloat16, 8), (torch.float16, 0)):
        for rows in (1, 8, 9, 16, 17):
            inputs = torch.zeros(1, rows, 64, dtype=dtype)
            assert compiled_pays(inputs, weight.to(dtype)) == (rows <= most)
            assert compiled_pays(inputs, weight.to(torch.int8)) == (rows <= 16)
    assert not compiled_pays(torch.zeros(1, 64, device="meta"), weight.to("meta"))
    assert not compiled_pays(torch.zeros(1, 64, dtype=torch.bfloat16), weight)


def test_a_bias_is_added() -> None:
    inputs, weight, bias = _random(3, 40), _random(6, 40), _random(6)
    for rows in (inputs, inputs.repeat(11, 1)):
        assert_close(few_rows_linear(rows, weight, bias), rows @ weight.t() + bias, rtol=FLOAT32_RTOL)
