"""Copies of values of the host to a rank's device, for which the host does not wait."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED = 16  # bytes: the largest element that a kernel reads at once


def on_device(values: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of the host on `device`, by one copy from pinned memory; on a CPU the tensors themselves."""
    if device.type == "cpu" or not values:
        return list(values)
    starts = list(accumulate((-(-each.nbytes // _ALIGNED) * _ALIGNED for each in values), initial=0))
    packed = torch.empty(starts.pop(), dtype=torch.uint8, pin_memory=True)
    for start, each in zip(starts, values, strict=True):
        _viewed(packed, start, each).copy_(each)
    arriving = packed.to(device, non_blocking=True)
    return [_viewed(arriving, start, each) for start, each in zip(starts, values, strict=True)]


def _viewed(packed: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the bytes from `start` on as a tensor of the type and shape of `like`."""
    return packed[start : start + like.nbytes].view(like.dtype).view(like.shape)
