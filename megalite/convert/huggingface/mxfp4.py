"""MXFP4 weights of experts, as gpt-oss is published, read as bfloat16, which holds each of their values exactly.

`name_blocks` uint8 [E, rows, G, 16] has two 4-bit values in a byte, the first in the lower half; `name_scales` uint8
[E, rows, G] has a power of two for each 32 of them: OCP 2023, "Microscaling formats". The weight is [E, 32 G, rows].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megalite.checkpoint.tensor_header import HeaderEntry
from megalite.topology.sharding import TensorSlice

BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK = 32
_BIAS = 127
# By sign, two bits of exponent and one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)


class WeightFile(Protocol):
    """A file with weights; `read` returns a region of one of its tensors and raises OSError."""

    @property
    def path(self) -> Path: ...

    @property
    def header(self) -> Mapping[str, HeaderEntry]: ...

    def read(self, name: str, region: TensorSlice) -> Tensor: ...


@dataclass(frozen=True)
class PackedExperts:
    """One weight of experts, whose blocks and scales may stand in two files."""

    name: str
    blocks: WeightFile
    scales: WeightFile

    @property
    def path(self) -> Path:
        return self.blocks.path

    @property
    def header(self) -> Mapping[str, HeaderEntry]:
        """The weight as one of bfloat16."""
        packed = self.blocks.header[f"{self.name}{BLOCKS}"]
        experts, rows, groups, _ = packed.shape
        return {self.name: HeaderEntry("BF16", (experts, groups * _BLOCK, rows), packed.start, packed.stop)}

    def read(self, name: str, region: TensorSlice) -> Tensor:
        """Return a region of the weight."""
        (expert, first, row), (experts, count, rows) = region.offsets, region.shape
        begin, end = first // _BLOCK, -(-(first + count) // _BLOCK)
        places, sizes = (expert, row, begin), (experts, rows, end - begin)
        blocks = self.blocks.read(f"{name}{BLOCKS}", TensorSlice((*places, 0), (*sizes, _BLOCK // 2)))
        scales = self.scales.read(f"{name}{SCALES}", TensorSlice(places, sizes))
        values = decoded(blocks, scales).flatten(2).transpose(1, 2)
        return values[:, first - begin * _BLOCK :][:, :count]


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values of blocks uint8 [..., G, 16] with scales uint8 [..., G]: bfloat16 [..., G, 32]."""
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(_VALUES[halves.int()], scales.int().unsqueeze(-1) - _BIAS)


def with_packed_experts(where: Mapping[str, WeightFile]) -> dict[str, WeightFile]:
    """Return tensor -> file with the weights of experts in place of their blocks and scales."""
    found: dict[str, WeightFile] = dict(where)
    for packed, file in where.items():
        name = packed.removesuffix(BLOCKS)
        scales = where.get(f"{name}{SCALES}")
        if (
            name != packed
            and scales is not None
            and _fit(file.header[packed], scales.header[f"{name}{SCALES}"])
        ):
            del found[packed], found[f"{name}{SCALES}"]
            found[name] = PackedExperts(name, file, scales)
    return found


def _fit(blocks: HeaderEntry, scales: HeaderEntry) -> bool:
    return (
        blocks.dtype == scales.dtype == "U8"
        and blocks.shape == (*scales.shape, _BLOCK // 2)
        and len(scales.shape) == 3
    )
