"""What the tests of compiled operators share: whether there are any, and how far one may be from the exact result."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megalite.ops import extension

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

OUTGROWING = 1 << 22
"""More values than csrc/cpu/streaming.h leaves to the caches of one thread, in 16 bits too, up to 2 MiB of them."""

# test_build.py fails where a compiler is here and the library is not.
needs_library = pytest.mark.skipif(
    not extension.available("cpu"), reason=f"no compiled operators: {extension.why_not('cpu')}"
)


def assert_no_worse(fused: Tensor, plain: Tensor, exact: Tensor, *, what: str) -> None:
    """The error of `fused` against `exact` (float64) is at most twice that of the plain form in the same dtype, plus
    one unit in the last place of the largest value; in float64, where the plain form is exact itself, 16 units."""
    assert fused.dtype == plain.dtype and fused.shape == plain.shape == exact.shape, what
    if not exact.numel():
        return
    error, allowed = ((each.double() - exact).abs().max().item() for each in (fused, plain))
    unit = torch.finfo(fused.dtype).eps * exact.abs().max().item()
    units = 16 if fused.dtype == torch.float64 else 1
    assert error <= 2 * allowed + units * unit, f"{what}: error {error:.2e}, of the plain form {allowed:.2e}"


def with_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Tensor]:
    """Outputs of function(*inputs), then the gradients of all inputs for these gradients of the outputs."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    made = function(*leaves)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    return [*(each.detach() for each in outputs), *torch.autograd.grad(outputs, leaves, grads)]
