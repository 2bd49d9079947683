"""The bytes of an int8 folder's values. packed_header.py tells the stored form, and which tensors have it."""

import torch
from torch import Tensor

_MIDDLE = -128


def pack(values: Tensor) -> Tensor:
    """Return int8 [rows, columns] as int32 [rows, columns / 4]."""
    return values.bitwise_xor(_MIDDLE).contiguous().view(torch.int32)


def unpacked(stored: Tensor) -> Tensor:
    """Return the int8 values of packed bytes, read as int8 of any shape."""
    return stored.bitwise_xor(_MIDDLE)
