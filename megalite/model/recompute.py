"""Recompute: forward keeps only a region's inputs; backward computes the region's saved tensors again.

Chen et al., "Training deep nets with sublinear memory cost", 2016; selective: Korthikanti et al., 2022.
"""

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), keeping no saved tensor for backward: only the inputs and the function itself.

    function must give the same tensors when it is called again, and change neither its inputs nor what its own
    operators save.
    """
    # Dropout is drawn by position, not from a generator whose state would have to be restored.
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output
