"""What the tests of compiled operators share: whether there are any, and an operator's outputs with its gradients."""

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


def with_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Tensor]:
    """Outputs of function(*inputs), then the gradients of all inputs for these gradients of the outputs."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    made = function(*leaves)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    return [*(each.detach() for each in outputs), *torch.autograd.grad(outputs, leaves, grads)]
