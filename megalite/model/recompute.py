"""Recompute: forward keeps only a region's inputs; backward computes the region's saved tensors again.

Chen et al., "Training deep nets with sublinear memory cost", 2016; selective: Korthikanti et al., 2022.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Regions that are computed again now. Not of a thread: autograd computes on a GPU in threads of its own.
_again = 0


def recomputing() -> bool:
    """Return whether backward computes a region again, in which nothing may be counted twice."""
    return _again > 0


@contextmanager
def _computing_again() -> Iterator[None]:
    global _again
    _again += 1
    try:
        yield
    finally:
        _again -= 1


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), keeping no saved tensor for backward: only the inputs and the function itself.

    function must give the same tensors when it is called again, and change neither its inputs nor what its own
    operators save.
    """
    # Dropout is drawn by position, not from a generator whose state would have to be restored.
    contexts = (nullcontext(), _computing_again())
    output: Tensor = checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts
    )
    return output
