"""Shared by the tests of compiled operators: skips without the library, and an operator's outputs with gradients."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megalite.ops import extension

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

OUTGROWING = 1 << 22
"""Enough values that csrc/cpu/streaming.h streams them, in bf16 too, on one thread with up to 2 MiB of L2 cache."""

# test_build.py fails if there is a compiler but no library.
needs_library = pytest.mark.skipif(
    not extension.available("cpu"), reason=f"no compiled operators: {extension.why_not('cpu')}"
)


def with_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Tensor]:
    """Return the outputs of function(*inputs), then the gradients of all inputs, given those of the outputs."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    made = function(*leaves)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    return [*(each.detach() for each in outputs), *torch.autograd.grad(outputs, leaves, grads)]
