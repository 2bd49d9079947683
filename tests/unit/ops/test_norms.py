"""Both forms of the norm give the same numbers, those of its formula."""

import pytest
import torch
from torch import Tensor

from megalite.ops.norms import rms_norm
from tests.support.parity import assert_close


def _formula(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * hidden_states / (hidden_states.square().mean(dim=-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("split_backward", [False, True])
def test_output_and_gradients_are_those_of_the_formula(split_backward: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs, weight, grad = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((3, 5, 12), (12,), (3, 5, 12))
    )

    def run(ours: bool) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (inputs, weight)]
        output = rms_norm(*leaves, 1e-3, split_backward=split_backward) if ours else _formula(*leaves, 1e-3)
        return [output, *torch.autograd.grad(output, leaves, grad)]

    for what, actual, expected in zip(("output", "inputs", "weight"), run(True), run(False), strict=True):
        assert_close(actual, expected, what=what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_are_equal_to_the_bit_forward(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    inputs, weight = torch.randn(4, 12, generator=generator), torch.randn(12, generator=generator)
    one, two = (
        rms_norm(inputs.to(dtype), weight.to(dtype), 1e-5, split_backward=split) for split in (False, True)
    )
    assert one.dtype == two.dtype == dtype
    assert torch.equal(one, two)
