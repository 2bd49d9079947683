"""Which tensors an int8 folder packs, and the bytes of their values. packed_header.py tells the stored form."""

from dataclasses import replace

import torch
from torch import Tensor

from megalite.convert.huggingface.packed_header import SCALE
from megalite.families.tensors import FamilyTensor

_MIDDLE = -128


def is_packed(tensor: FamilyTensor) -> bool:
    """Whether a tensor of a family is quantised: a matrix of a decoder layer, stored as [out, in]."""
    inner = tensor.parts[0].startswith("model.layers.") and len(tensor.shape) == 2
    return inner and not tensor.transposed


def scale_of(tensor: FamilyTensor) -> FamilyTensor:
    """Return the tensor of the scales [rows, 1] of a quantised one."""
    return replace(tensor, name=f"{tensor.name}{SCALE}", shape=(tensor.shape[0], 1))


def pack(values: Tensor) -> Tensor:
    """Return int8 [rows, columns] as int32 [rows, columns / 4]."""
    return values.bitwise_xor(_MIDDLE).contiguous().view(torch.int32)


def unpacked(stored: Tensor) -> Tensor:
    """Return the int8 values of packed bytes, read as int8 of any shape."""
    return stored.bitwise_xor(_MIDDLE)
