"""Refuse weights that are no numbers: a model with one NaN trains to nothing, hours later."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.errors import CheckpointError


def require_finite(values: Tensor, name: str, source: object, offsets: Sequence[int] = ()) -> None:
    """Raise CheckpointError with the first element that is NaN or infinite.

    name: the tensor as `source`, a file or folder, calls it. offsets: index of the values' first element in it.
    """
    finite = values.isfinite()
    if finite.all():
        return
    first = tuple(torch.unravel_index((~finite).flatten().int().argmax(), values.shape))
    start = tuple(offsets) or (0,) * values.dim()
    index = [low + int(at) for low, at in zip(start, first, strict=True)]
    raise CheckpointError(
        f"{source}: {name} has {values[first].item()} at {index}, which is not a valid weight; fetch the file again or"
        " use weights that were saved before the training diverged"
    )
