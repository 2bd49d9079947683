"""The norm gives the numbers of its formula."""

import pytest
import torch
from torch import Tensor

from megalite.ops.norms import compiled_norm, rms_norm
from tests.support.parity import assert_close


def _formula(hidden_states: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    weight = 1 + weight if zero_centered else weight
    return weight * hidden_states / (hidden_states.square().mean(dim=-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("zero_centered", [False, True], ids=["weight", "1 + weight"])
def test_output_and_gradients_are_those_of_the_formula(zero_centered: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs, weight, grad = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((3, 5, 12), (12,), (3, 5, 12))
    )

    def run(ours: bool) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (inputs, weight)]
        output = rms_norm(*leaves, 1e-3, zero_centered) if ours else _formula(*leaves, 1e-3, zero_centered)
        return [output, *torch.autograd.grad(output, leaves, grad)]

    for what, actual, expected in zip(("output", "inputs", "weight"), run(True), run(False), strict=True):
        assert_close(actual, expected, what=what)


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
    by_torch = compiled_norm(inputs, norm.weight, None, norm.eps, zero_centered_gamma=True)
    assert torch.equal(by_torch, theirs), "the compiled operator would round 1 + weight"
