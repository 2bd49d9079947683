"""The norm gives the numbers of its formula."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import norms
from megalite.ops.norms import compiled_norm, rms_norm
from tests.support.parity import BF16_RTOL, assert_close


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """Let torch say that it has a fused kernel for every device; the dtypes of the weights that it is called with."""
    calls: list[torch.dtype] = []
    by_torch = F.rms_norm

    def spied(x: Tensor, shape: torch.Size, weight: Tensor, eps: float) -> Tensor:
        calls.append(weight.dtype)
        return by_torch(x, shape, weight, eps)

    monkeypatch.setattr(F, "rms_norm", spied)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: True)
    norms.has_fused_rms_norm.cache_clear()
    yield calls
    norms.has_fused_rms_norm.cache_clear()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_torch_has_one_kernel_for_it_that_kernel_computes_it(
    fused: list[torch.dtype], dtype: torch.dtype
) -> None:
    """A fused one: 12 bytes of memory for each element instead of 102, forward and backward."""
    generator = torch.Generator().manual_seed(1)
    inputs, residual, weight = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 12), (3, 12), (12,))
    )
    assert torch.equal(norms.norm(inputs, weight, None, 1e-3), F.rms_norm(inputs, (12,), weight, 1e-3))
    total = inputs + residual
    summed, normed = norms.add_norm(inputs, residual, weight, None, 1e-3)
    assert torch.equal(summed, total) and torch.equal(normed, F.rms_norm(total, (12,), weight, 1e-3))
    assert fused == [dtype] * 4


def _fused_backward(
    grad: Tensor, x: Tensor, shape: list[int], inverse_rms: Tensor, weight: Tensor, needed: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute what torch's kernel for CUDA does; it has none for a CPU."""
    assert {each.dtype for each in (grad, x, inverse_rms, weight)} == {torch.float32}
    normalised, scaled = x * inverse_rms, grad * weight
    x_grad = (scaled - normalised * (scaled * normalised).mean(-1, keepdim=True)) * inverse_rms
    weight_grad = (grad * normalised).flatten(0, -2).sum(0)
    return (x_grad if needed[0] else None), (weight_grad if needed[1] else None)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_one_plus_a_narrow_weight_goes_through_torchs_kernel_in_float32(
    fused: list[torch.dtype], trained: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    inputs, grad = (torch.randn(3, 5, 12, generator=generator).bfloat16() for _ in range(2))
    weight = torch.full((12,), 2**-9 + 2**-10).bfloat16()  # lost in 1 + weight of 16 bits

    def run() -> list[Tensor]:
        leaves = [inputs.clone().requires_grad_(), weight.clone().requires_grad_(trained)]
        output = norms.rms_norm(*leaves, 1e-3, zero_centered_gamma=True)
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        return [output, *torch.autograd.grad(output, asked, grad)]

    kernel = mock.Mock(side_effect=_fused_backward)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm_backward", lambda *inputs: kernel(*inputs), "CPU")
    try:
        by_kernel = run()
    finally:
        library._destroy()
    assert [call.args[-1] for call in kernel.call_args_list] == [[True, trained]]
    assert not fused, "F.rms_norm would keep the input in float32"
    norms.has_fused_rms_norm.cache_clear()
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
        expected = run()
    norms.has_fused_rms_norm.cache_clear()
    assert torch.equal(by_kernel[0], expected[0]), "1 + weight was rounded"
    for what, actual, each in zip(("output", "inputs", "weight"), by_kernel, expected, strict=False):
        assert actual.dtype == torch.bfloat16
        assert_close(actual, each, rtol=BF16_RTOL, what=what)


def test_with_torchs_kernel_the_numbers_are_those_of_the_formula(fused: list[torch.dtype]) -> None:
    for zero_centered in (False, True):
        test_output_and_gradients_are_those_of_the_formula(zero_centered)
    assert fused


def test_on_a_cpu_the_norm_is_one_autograd_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "rms_norm", None)
    normed = norms.norm(torch.ones(2, 4, requires_grad=True), torch.ones(4), None, 1e-3)
    assert type(normed.grad_fn).__name__ == "_RMSNormBackward"
