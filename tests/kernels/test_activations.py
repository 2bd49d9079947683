"""The compiled activations and their gradients: no worse than plain torch, in every type and shape."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.ops.activations import (
    bias_gelu,
    compiled_bias_gelu,
    compiled_geglu,
    compiled_swiglu,
    geglu,
    swiglu,
)
from tests.support.kernels import DTYPES, needs_library, with_gradients
from tests.support.parity import assert_no_worse

pytestmark = needs_library
GENERATOR = torch.Generator().manual_seed(11)
GATED: dict[str, Callable[..., Tensor]] = {
    "swiglu": lambda gate_up, fused=False: (compiled_swiglu if fused else swiglu)(gate_up),
    "geglu": lambda gate_up, fused=False: (compiled_geglu if fused else geglu)(gate_up),
    "geglu, tanh": lambda gate_up, fused=False: (compiled_geglu if fused else geglu)(
        gate_up, approximate="tanh"
    ),
}
gated = pytest.mark.parametrize("activation", GATED.values(), ids=GATED)
approximated = pytest.mark.parametrize("approximate", ["none", "tanh"])


def _compare(
    activation: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, dtype: torch.dtype
) -> None:
    narrow, narrow_grad = [each.to(dtype) for each in inputs], grad.to(dtype)
    exact = with_gradients(activation, [each.double() for each in narrow], [narrow_grad.double()])
    plain = with_gradients(activation, narrow, [narrow_grad])
    fused = with_gradients(lambda *each: activation(*each, fused=True), narrow, [narrow_grad])
    for place, results in enumerate(zip(fused, plain, exact, strict=True)):
        assert_no_worse(*results, what=f"result {place}")


def _biased(approximate: str) -> Callable[..., Tensor]:
    def run(inputs: Tensor, bias: Tensor, fused: bool = False) -> Tensor:
        return (compiled_bias_gelu if fused else bias_gelu)(inputs, bias, approximate=approximate)

    return run


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


@gated
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations_and_gradients(activation: Callable[..., Tensor], dtype: torch.dtype) -> None:
    _compare(activation, [_random(3, 40, 192) * 3], _random(3, 40, 96), dtype)


@approximated
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_gelu_and_gradients(dtype: torch.dtype, approximate: str) -> None:
    inputs = [_random(3, 50, 96) * 2, _random(96)]
    _compare(_biased(approximate), inputs, _random(3, 50, 96), dtype)


@approximated
def test_gelu_without_a_bias(approximate: str) -> None:
    def run(inputs: Tensor, fused: bool = False) -> Tensor:
        return (compiled_bias_gelu if fused else bias_gelu)(inputs, None, approximate=approximate)

    for dtype in DTYPES:
        _compare(run, [_random(5, 33)], _random(5, 33), dtype)


@settings(max_examples=60, derandomize=True)
@given(
    st.integers(1, 140),
    st.integers(1, 70),
    st.sampled_from(DTYPES),
    st.sampled_from([*GATED, "none", "tanh"]),
)
def test_ragged_shapes(rows: int, features: int, dtype: torch.dtype, name: str) -> None:
    if name in GATED:
        _compare(GATED[name], [_random(rows, 2 * features)], _random(rows, features), dtype)
    else:
        # All positive: a bias gradient that is small by cancellation does not show which form is more exact.
        inputs, bias, grad = (
            _random(*shape).abs() for shape in ((rows, features), (features,), (rows, features))
        )
        _compare(_biased(name), [inputs, bias], grad, dtype)


# Errors in units in the last place of the exact result, away from cancellation, and in the lower tail, where the
# rounding error of the argument grows. Plain torch is off by millions of units in GELU's lower tail.
@pytest.mark.parametrize(
    ("activation", "low", "high", "units"),
    [
        ("silu", -80, 80, 4), ("none", -1, 12, 4), ("none", -12, -1, 8), ("tanh", -1, 12, 6), ("tanh", -5, -1, 60),
    ],
)  # fmt: skip
def test_float32_is_right_to_the_last_places(activation: str, low: float, high: float, units: float) -> None:
    x = torch.linspace(low, high, 100_001)
    wide = x.double()
    if activation == "silu":
        made, exact = (
            compiled_swiglu(torch.stack([x, torch.ones_like(x)], dim=-1))[:, 0],
            wide * wide.sigmoid(),
        )
    else:
        made = compiled_bias_gelu(x, None, approximate=activation)
        inner = (8 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
        below = torch.special.erfc(-wide / 2**0.5) / 2 if activation == "none" else inner.sigmoid()
        exact = wide * below
    unit = (
        torch.nextafter(exact.float().abs(), torch.tensor(torch.inf)).double() - exact.float().abs().double()
    )
    assert ((made.double() - exact).abs() / unit).max() <= units


@gated
def test_extreme_gates(activation: Callable[..., Tensor]) -> None:
    """Values and slopes approach their limits, and NaN stays NaN."""
    gate = torch.tensor([1e30, 200.0, 0.0, -200.0, -1e30, torch.nan])
    gate_up = torch.stack([gate, torch.ones(6)], dim=-1)
    made, grad = with_gradients(lambda each: activation(each, fused=True), [gate_up], [torch.ones(6, 1)])
    assert made[:5, 0].tolist() == [gate[0], 200, 0, 0, 0] and made[5].isnan()
    assert grad[:5, 0].tolist() == [1, 1, 0.5, 0, 0] and grad[5].isnan().all()


@gated
def test_gated_gradients_are_those_of_the_outputs(activation: Callable[..., Tensor]) -> None:
    assert torch.autograd.gradcheck(
        lambda each: activation(each, fused=True), [_random(3, 10).requires_grad_()]
    )


@approximated
def test_gradients_of_bias_gelu_are_those_of_the_outputs(approximate: str) -> None:
    inputs = [_random(4, 5).requires_grad_(), _random(5).requires_grad_()]
    form = _biased(approximate)
    assert torch.autograd.gradcheck(lambda *each: form(*each, fused=True), inputs)


def test_operators_keep_torchs_rules() -> None:
    operators = torch.ops.megalite
    torch.library.opcheck(operators.glu.default, (_random(2, 3, 8).requires_grad_(), 0))
    torch.library.opcheck(operators.glu_backward.default, (_random(2, 3, 4), _random(2, 3, 8), 0))
    for bias in (_random(8), None):
        leaves = [each if each is None else each.requires_grad_() for each in (_random(2, 3, 8), bias)]
        torch.library.opcheck(operators.bias_gelu.default, (*leaves, 1))
        still = None if bias is None else bias.detach()
        arguments = (_random(2, 3, 8), _random(2, 3, 8), still, 1)
        torch.library.opcheck(operators.bias_gelu_backward.default, arguments)


def test_tensors_without_data() -> None:
    gate_up = torch.empty(2, 3, 8, device="meta")
    for made, features in (
        (compiled_swiglu(gate_up), 4),
        (compiled_bias_gelu(gate_up, gate_up[0, 0]), 8),
    ):
        assert made.shape == (2, 3, features) and made.is_meta


def test_compiled_without_a_break() -> None:
    inputs, grads = [_random(2, 3, 16), _random(16)], [_random(2, 3, 8)]

    def run(inputs: Tensor, bias: Tensor) -> Tensor:
        return compiled_swiglu(compiled_bias_gelu(inputs, bias))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    pairs = zip(with_gradients(compiled, inputs, grads), with_gradients(run, inputs, grads), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_inputs_with_gaps_count_as_their_values() -> None:
    inputs, bias = _random(16, 6).t(), _random(32)[::2]
    for made, expected in (
        (compiled_swiglu(inputs), compiled_swiglu(inputs.contiguous())),
        (
            compiled_bias_gelu(inputs.t(), bias[:6].repeat(1)),
            compiled_bias_gelu(inputs.t().clone(), bias[:6].clone()),
        ),
    ):
        assert torch.equal(made, expected)


def test_the_number_of_threads_changes_no_bit() -> None:
    inputs, grads = [_random(1000, 64), _random(64)], [_random(1000, 64)]
    results, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(with_gradients(lambda *each: compiled_bias_gelu(*each), inputs, grads))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_no_rows_give_gradients_of_zero() -> None:
    _, inputs_grad, bias_grad = with_gradients(
        lambda *each: compiled_bias_gelu(*each), [_random(0, 8), _random(8)], [_random(0, 8)]
    )
    assert inputs_grad.shape == (0, 8) and bias_grad.shape == (8,) and not bias_grad.any()
    assert compiled_swiglu(_random(0, 8)).shape == (0, 4)


@pytest.mark.parametrize(
    ("operator", "arguments", "said"),
    [
        ("glu", (torch.ones(3, 5), 0), "gate_up must have an even number of columns, not 5"),
        ("glu", (torch.ones(3, 4), 7), "no kernel for this dtype or size"),
        (
            "glu",
            (torch.ones(3, 4, dtype=torch.int64), 0),
            "the dtype must be float32, float64, bfloat16 or float16",
        ),
        ("glu_backward", (torch.ones(3, 3), torch.ones(3, 4), 0), "grad has 9 elements, not 6"),
        ("bias_gelu", (torch.ones(3, 4), torch.ones(3), 1), "bias has 3 elements, not 4"),
        ("bias_gelu", (torch.ones(3, 4), torch.ones(4).double(), 1), "bias has another dtype"),
        ("bias_gelu", (torch.ones(3, 4), torch.ones(4), 0), "no kernel for this dtype or size"),
    ],
)
def test_what_does_not_fit_is_refused(operator: str, arguments: tuple, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        getattr(torch.ops.megalite, operator)(*arguments)
