"""Both forms of the norm give the same numbers, those of its formula."""

import pytest
import torch
from torch import Tensor

from megalite.ops.norms import rms_norm, rms_norm_split, why_not_compiled
from tests.support.parity import assert_close


def _formula(hidden_states: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    weight = 1 + weight if zero_centered else weight
    return weight * hidden_states / (hidden_states.square().mean(dim=-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("zero_centered", [False, True], ids=["weight", "1 + weight"])
@pytest.mark.parametrize("split_backward", [False, True])
def test_output_and_gradients_are_those_of_the_formula(split_backward: bool, zero_centered: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs, weight, grad = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((3, 5, 12), (12,), (3, 5, 12))
    )

    def run(ours: bool) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (inputs, weight)]
        norm = rms_norm_split if split_backward else rms_norm
        output = norm(*leaves, 1e-3, zero_centered) if ours else _formula(*leaves, 1e-3, zero_centered)
        return [output, *torch.autograd.grad(output, leaves, grad)]

    for what, actual, expected in zip(("output", "inputs", "weight"), run(True), run(False), strict=True):
        assert_close(actual, expected, what=what)


@pytest.mark.parametrize("zero_centered", [False, True], ids=["weight", "1 + weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_are_equal_to_the_bit_forward(dtype: torch.dtype, zero_centered: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    inputs, weight = torch.randn(4, 12, generator=generator), torch.randn(12, generator=generator)
    one, two = (
        norm(inputs.to(dtype), weight.to(dtype), 1e-5, zero_centered) for norm in (rms_norm, rms_norm_split)
    )
    assert one.dtype == two.dtype == dtype
    assert torch.equal(one, two)


def test_one_and_a_narrow_weight_are_added_before_they_are_rounded() -> None:
    """As Gemma's norm in transformers; 1 + weight in bfloat16 would lose 2^-9."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    inputs = torch.randn(64, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    norm = Gemma2RMSNorm(48).bfloat16()
    with torch.no_grad():
        norm.weight.fill_(2**-9 + 2**-10)
        theirs = norm(inputs)
        ours = rms_norm(inputs, norm.weight, norm.eps, zero_centered_gamma=True)
        rounded = rms_norm(inputs, 1 + norm.weight, norm.eps)
    assert torch.equal(ours, theirs)
    assert not torch.equal(rounded, theirs)
    assert why_not_compiled(torch.bfloat16, zero_centered_gamma=True)
    assert not why_not_compiled(torch.float32, zero_centered_gamma=True)
