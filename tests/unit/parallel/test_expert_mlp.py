"""The MLPs of several experts give the gradients of plain autograd, in place or later where they are told to."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.activations import clamped_swiglu, swiglu
from megalite.ops.adamw import add_weight_gradient_
from megalite.ops.expert_products import with_expert_biases
from megalite.parallel.gradient_sums import BY_AUTOGRAD, WeightGradients, deferred_weight_gradients
from tests.support.mixtures import expert_mlp
from tests.support.parity import CHUNKED_RTOL, OPERATOR_RTOL, assert_close

HIDDEN, WIDTH = 8, 16
IN_PLACE = WeightGradients(accumulate=add_weight_gradient_)
COUNTS = {
    "some": (3, 0, 1, 7, 0),
    "the first and the last without rows": (0, 5, 0),
    "one expert": (6,),
    "no rows": (0, 0, 0),
}


def weights(experts: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(7)
    shapes = ((experts * 2 * WIDTH, HIDDEN), (experts * HIDDEN, WIDTH))
    return [
        torch.randn(shape, generator=drawn, dtype=torch.float64).div(2).to(dtype).requires_grad_()
        for shape in shapes
    ]


def rows_and_grad(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    rows, grad = torch.randn(2, count, HIDDEN, generator=drawn, dtype=torch.float64)
    return rows, grad


def plain(rows: Tensor, counts: tuple[int, ...], gate_up: Tensor, down: Tensor) -> Tensor:
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    wide, narrow = gate_up.view(len(counts), -1, HIDDEN)[expert], down.view(len(counts), -1, WIDTH)[expert]
    gate, up = torch.einsum("rh,rfh->rf", rows, wide).chunk(2, dim=1)
    return torch.einsum("rf,rhf->rh", F.silu(gate) * up, narrow)


@pytest.mark.parametrize("gradients", [BY_AUTOGRAD, IN_PLACE], ids=["by autograd", "in place"])
@pytest.mark.parametrize("name", COUNTS)
def test_output_and_gradients_are_those_of_plain_autograd(name: str, gradients: WeightGradients) -> None:
    counts = COUNTS[name]
    own, references = weights(len(counts)), weights(len(counts))
    for micro_batch in range(2):
        rows, grad = rows_and_grad(sum(counts), seed=micro_batch)
        inputs, expected = rows.clone().requires_grad_(), rows.requires_grad_()
        output, reference = (
            expert_mlp(inputs, counts, *own, swiglu, gradients),
            plain(expected, counts, *references),
        )
        assert_close(output, reference, rtol=OPERATOR_RTOL, what="output")
        output.backward(grad)
        reference.backward(grad)
        assert_close(inputs.grad, expected.grad, rtol=OPERATOR_RTOL, what="rows")
        counts = counts[::-1]
    for what, weight, reference in zip(("gate and up", "down"), own, references, strict=True):
        assert_close(weight.grad, reference.grad, rtol=OPERATOR_RTOL, what=what)


def test_a_split_backward_leaves_the_weights_for_later() -> None:
    counts = COUNTS["some"]
    own, references = weights(5), weights(5)
    rows, grad = rows_and_grad(sum(counts))
    inputs = rows.clone().requires_grad_()
    output = expert_mlp(inputs, counts, *own, swiglu, WeightGradients(deferrable=True))
    with deferred_weight_gradients() as later:
        output.backward(grad)
    assert inputs.grad is not None and [weight.grad for weight in own] == [None, None]
    for compute in later:
        compute()
    plain(rows, counts, *references).backward(grad)
    for weight, reference in zip(own, references, strict=True):
        assert_close(weight.grad, reference.grad, rtol=OPERATOR_RTOL)


def test_in_16_bits_sums_are_float32_and_experts_without_rows_are_left_alone() -> None:
    counts = COUNTS["some"]
    own = weights(5, torch.bfloat16)
    for weight in own:
        weight.grad_dtype = torch.float32
    references = [weight.detach().double().requires_grad_() for weight in own]
    rows, grad = (values.bfloat16() for values in rows_and_grad(sum(counts)))
    for _ in range(2):
        expert_mlp(rows, counts, *own, swiglu, IN_PLACE).backward(grad)
        plain(rows.double(), counts, *references).backward(grad.double())
    for weight, reference in zip(own, references, strict=True):
        assert weight.grad.dtype == torch.float32
        assert_close(weight.grad, reference.grad, rtol=CHUNKED_RTOL[torch.bfloat16])
        assert not weight.grad.view(5, -1)[1].any()


def test_frozen_weights_get_no_gradient() -> None:
    own = [weight.requires_grad_(False) for weight in weights(5)]
    rows, grad = rows_and_grad(11)
    output = expert_mlp(rows.requires_grad_(), COUNTS["some"], *own, swiglu, IN_PLACE)
    output.backward(grad)
    assert rows.grad.any() and [weight.grad for weight in own] == [None, None]


@pytest.mark.parametrize("name", COUNTS)
def test_each_row_has_the_bias_of_its_expert(name: str) -> None:
    counts = COUNTS[name]
    rows, grad = rows_and_grad(sum(counts))
    bias = torch.randn(len(counts) * HIDDEN, dtype=torch.float64, requires_grad=True)
    inputs = rows.clone().requires_grad_()
    biased = with_expert_biases(inputs * 1, bias, counts)
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    assert torch.equal(biased, rows + bias.detach().view(len(counts), HIDDEN)[expert])
    biased.backward(grad)
    sums = torch.zeros(len(counts), HIDDEN, dtype=torch.float64).index_add_(0, expert, grad)
    assert torch.equal(inputs.grad, grad)
    assert_close(bias.grad, sums.flatten(), rtol=OPERATOR_RTOL, what="bias")


def test_a_bias_that_another_rank_adds_has_a_gradient_of_zeros() -> None:
    rows, grad = rows_and_grad(11)
    bias = torch.ones(5 * HIDDEN, dtype=torch.float64, requires_grad=True)
    inputs = rows.clone().requires_grad_()
    biased = with_expert_biases(inputs * 1, bias, COUNTS["some"], added=False)
    assert torch.equal(biased, rows)
    biased.backward(grad)
    assert torch.equal(inputs.grad, grad) and torch.equal(bias.grad, torch.zeros_like(bias))


def test_the_clamped_activation_is_that_of_gpt_oss() -> None:
    drawn = torch.randn(50, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 6
    drawn[0, 0], drawn[1, 7] = 7.0, -7.0  # on the limit is not beyond it
    inputs, expected = (drawn.clone().requires_grad_() for _ in range(2))
    gate, up = expected.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    reference = (up + 1) * gate * torch.sigmoid(gate * 1.702)
    activated = clamped_swiglu(inputs, limit=7.0)
    assert_close(activated, reference, rtol=OPERATOR_RTOL)
    assert (drawn > 7).any() and (drawn < -7).any()
    grad = torch.randn(50, 6, dtype=torch.float64)
    activated.backward(grad)
    reference.backward(grad)
    assert_close(inputs.grad, expected.grad, rtol=OPERATOR_RTOL)
