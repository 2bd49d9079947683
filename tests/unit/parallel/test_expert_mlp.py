"""The MLPs of several experts give the gradients of plain autograd, in place or later where they are told to."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.activations import swiglu
from megalite.ops.adamw import add_weight_gradient_
from megalite.parallel.experts import expert_mlp
from megalite.parallel.gradient_sums import BY_AUTOGRAD, WeightGradients, deferred_weight_gradients
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
