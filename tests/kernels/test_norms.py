"""The compiled norms and their gradients: no worse than plain torch, in every type, form and shape."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.ops.norms import compiled_add_norm, compiled_norm, norm
from tests.support.kernels import DTYPES, OUTGROWING, needs_library, with_gradients
from tests.support.parity import OPERATOR_RTOL, assert_close, assert_no_worse

pytestmark = needs_library
EPS = 1e-5


def _plain(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, norm(total, weight, bias, EPS)


def _fused(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return compiled_add_norm(x, residual, weight, bias, EPS)


def _inputs(rows: int, columns: int, centred: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return x, residual, weight (and bias) with a mean far from 0, and gradients of both outputs, in float64."""
    generator = torch.Generator().manual_seed(1000 * rows + columns)
    x, residual, *grads = (
        torch.randn(rows, columns, dtype=torch.float64, generator=generator) for _ in range(4)
    )
    parameters = [torch.randn(columns, dtype=torch.float64, generator=generator) for _ in range(1 + centred)]
    return [x + 0.5, residual * 2, *parameters], grads


def _names(centred: bool) -> list[str]:
    names = ["sum", "output", "x_grad", "residual_grad", "weight_grad", "bias_grad"]
    return names if centred else names[:-1]


def _compare(rows: int, columns: int, dtype: torch.dtype, *, centred: bool) -> None:
    inputs, grads = ([each.to(dtype) for each in group] for group in _inputs(rows, columns, centred))
    exact = with_gradients(_plain, [each.double() for each in inputs], [each.double() for each in grads])
    plain = with_gradients(_plain, inputs, grads)
    fused = with_gradients(_fused, inputs, grads)
    for name, *results in zip(_names(centred), fused, plain, exact, strict=True):
        assert_no_worse(*results, what=name)


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_norm_and_gradients(dtype: torch.dtype, centred: bool) -> None:
    _compare(70, 96, dtype, centred=centred)


@settings(max_examples=40, derandomize=True)
@given(st.integers(1, 70), st.integers(8, 300), st.sampled_from(DTYPES), st.booleans())
def test_ragged_shapes(rows: int, columns: int, dtype: torch.dtype, centred: bool) -> None:
    """Fewer columns are not tested: the gradients of LayerNorm over two values cancel to rounding noise."""
    _compare(rows, columns, dtype, centred=centred)


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_without_a_residual(centred: bool) -> None:
    (x, _, *parameters), (grad, _) = _inputs(6, 40, centred)

    def run(form: Callable[..., Tensor]) -> list[Tensor]:
        def normed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return form(x, weight, bias, EPS)

        return with_gradients(normed, [x, *parameters], [grad])

    for ours, torchs in zip(run(compiled_norm), run(norm), strict=True):
        assert_close(ours, torchs, rtol=OPERATOR_RTOL)


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_gradients_are_those_of_the_outputs(centred: bool) -> None:
    inputs, _ = _inputs(3, 7, centred)
    assert torch.autograd.gradcheck(_fused, [each.requires_grad_() for each in inputs])


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_operators_keep_torchs_rules(centred: bool) -> None:
    (x, residual, weight, *bias), (grad, sum_grad) = _inputs(5, 12, centred)
    operators, shift = torch.ops.megalite, bias[0] if bias else None
    total, _, mean, inverse = operators.norm(x, residual, weight, shift, EPS)
    centre = mean if centred else None
    leaves = [each if each is None else each.requires_grad_() for each in (x, residual, weight, shift)]
    for arguments in ((*leaves, EPS), (x, None, weight, shift, EPS)):
        torch.library.opcheck(operators.norm.default, arguments)
    for given_sum in (sum_grad, None):
        arguments = (grad, given_sum, total, weight.detach(), centre, inverse)
        torch.library.opcheck(operators.norm_backward.default, arguments)
        torch.library.opcheck(operators.norm_input_grad.default, arguments)
    torch.library.opcheck(operators.norm_weight_grad.default, (grad, total, centre, inverse))


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_tensors_without_data(centred: bool) -> None:
    inputs, _ = _inputs(4, 8, centred)
    outputs = _fused(*(each.to("meta") for each in inputs))
    assert [(each.shape, each.dtype, each.is_meta) for each in outputs] == [((4, 8), torch.float64, True)] * 2


def test_compiled_without_a_break() -> None:
    inputs, grads = _inputs(4, 8, True)
    compiled = torch.compile(_fused, fullgraph=True, backend="aot_eager")
    for one, two in zip(
        with_gradients(compiled, inputs, grads), with_gradients(_fused, inputs, grads), strict=True
    ):
        assert torch.equal(one, two)


def test_inputs_with_gaps_count_as_their_values() -> None:
    inputs, _ = _inputs(6, 10, True)
    spread = [torch.stack([each, each + 1], dim=-1)[..., 0] for each in inputs]
    assert not any(each.is_contiguous() for each in spread)
    for one, two in zip(_fused(*spread), _fused(*inputs), strict=True):
        assert torch.equal(one, two)


def test_the_number_of_threads_changes_no_bit() -> None:
    inputs, grads = _inputs(300, 64, True)
    results, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(with_gradients(_fused, inputs, grads))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_rows_beyond_the_caches_are_the_same_to_the_bit(dtype: torch.dtype, centred: bool) -> None:
    """Large outputs are streamed and small ones are not; rows of 1027 start and end inside cache lines."""
    torch.manual_seed(0)
    x, residual, of_sum, of_norm = torch.randn(4, OUTGROWING // 1027, 1027).to(dtype)
    parameters = [torch.randn(1027).to(dtype) for _ in range(1 + centred)]
    whole, threads = [], torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = with_gradients(_fused, [x, residual, *parameters], [of_sum, of_norm])
    finally:
        torch.set_num_threads(threads)
    for rows in (slice(0, 60), slice(-60, None)):
        grads = [of_sum[rows], of_norm[rows]]
        few = with_gradients(_fused, [x[rows], residual[rows], *parameters], grads)
        assert all(torch.equal(one[rows], two) for one, two in zip(whole[:4], few[:4], strict=True))


def test_no_rows_give_gradients_of_zero() -> None:
    inputs, grads = _inputs(0, 8, True)
    *_, weight_grad, bias_grad = with_gradients(_fused, inputs, grads)
    assert not weight_grad.any() and not bias_grad.any() and len(weight_grad) == len(bias_grad) == 8


@pytest.mark.parametrize("frozen", ["weights", "inputs"])
def test_no_gradient_is_computed_that_nobody_wants(monkeypatch: pytest.MonkeyPatch, frozen: str) -> None:
    inputs, (_, grad) = _inputs(4, 8, True)
    x, residual, weight, bias = inputs
    wanted, unwanted = (x, "norm_weight_grad") if frozen == "weights" else (weight, "norm_input_grad")
    wanted.requires_grad_()
    _, output = _fused(x, residual, weight, bias)

    def refuse(*_: Tensor) -> None:
        raise AssertionError("computed, though frozen")

    for operator in ("norm_backward", unwanted):
        monkeypatch.setattr(torch.ops.megalite, operator, refuse)
    [found] = torch.autograd.grad(output, [wanted], grad)
    assert found.shape == wanted.shape and found.any()


def test_values_that_are_not_finite_stay_seen() -> None:
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    x[0, 3] = float("nan")
    output = compiled_norm(x, torch.ones(16, dtype=torch.bfloat16), None, EPS)
    assert output[0].isnan().all() and torch.equal(output[1], F.rms_norm(x[1], (16,), eps=EPS))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.ones(7)}, "weight has 7 elements, not 8"),
        ({"residual": torch.ones(3, 8)}, "residual has 24 elements, not 32"),
        ({"bias": torch.ones(8, dtype=torch.float64)}, "bias has another dtype"),
        (
            {"x": torch.ones(4, 8, dtype=torch.int64)},
            "the dtype must be float32, float64, bfloat16 or float16",
        ),
    ],
    ids=lambda case: "" if isinstance(case, str) else next(iter(case)),
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], said: str) -> None:
    fitting = {
        "x": torch.ones(4, 8),
        "residual": torch.ones(4, 8),
        "weight": torch.ones(8),
        "bias": torch.ones(8),
    }
    with pytest.raises(RuntimeError, match=said):
        torch.ops.megalite.norm(*(fitting | change).values(), EPS)


@pytest.mark.parametrize("which", ["mean", "inverse"])
def test_a_statistic_of_another_dtype_is_refused(which: str) -> None:
    grad, x = torch.randn(2, 3, 8)
    statistics = {"mean": torch.zeros(3), "inverse": torch.ones(3)}
    statistics[which] = statistics[which].double()
    with pytest.raises(RuntimeError, match=f"{which} has another dtype than float32"):
        torch.ops.megalite.norm_backward(
            grad, None, x, torch.ones(8), statistics["mean"], statistics["inverse"]
        )
