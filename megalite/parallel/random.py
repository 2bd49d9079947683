"""Random numbers as a pure function of (seed, name, step, global index), independent of the layout.

The generator is Philox4x32-10 (ops/counter.py, like attention dropout). It has no state to save: a rank draws its
slice, and all layouts agree on every element.
"""

import hashlib
import math

import torch
from torch import Tensor

from megalite.ops.counter import MASK_LEVELS, philox
from megalite.topology.sharding import TensorSlice

_MASK = 0xFFFFFFFF
# Counters per block: small enough for the CPU cache, large enough to hide torch's overhead per call or launch.
_CPU = torch.device("cpu")
_BLOCK, _DEVICE_BLOCK = 1 << 16, 1 << 20
# One 128-bit counter value gives eight 16-bit mask values.
_OCTET = 8


def key_of(seed: int, name: str) -> tuple[int, int]:
    """Return the generator key, two 32-bit words, of a named stream."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def normal_slice(
    seed: int,
    name: str,
    region: TensorSlice,
    std: float,
    *,
    step: int = 0,
    device: torch.device = _CPU,
) -> Tensor:
    """Return a slice of the normal tensor `name`: float64, shape `region.shape`, mean 0, standard deviation `std`.

    Drawn on `device`: the logarithm and the cosine of another device may differ in float64's last bit.

    Four neighbouring columns share a counter (column // 4, row, row >> 32, step). Tensors have one or two dims: the
    counter has no room for a third.
    """
    rows, columns = region.shape if len(region.shape) == 2 else (1, region.shape[0])
    first_row, first_column = region.offsets if len(region.shape) == 2 else (0, region.offsets[0])
    first_quad, last_quad = first_column // 4, (first_column + columns - 1) // 4
    quads = torch.arange(first_quad, last_quad + 1, device=device)
    key = key_of(seed, name)
    values = torch.empty(rows, columns, dtype=torch.float64, device=device)
    skip = first_column - first_quad * 4
    rows_per_block = max(1, (_BLOCK if device.type == "cpu" else _DEVICE_BLOCK) // len(quads))
    steps = torch.full((1,), step, device=device)
    for start in range(0, rows, rows_per_block):
        stop = min(start + rows_per_block, rows)
        row = torch.arange(first_row + start, first_row + stop, device=device).unsqueeze(1)
        words = philox((quads, row & _MASK, row >> 32, steps), key)
        drawn = torch.stack(_box_muller(*words), dim=-1).flatten(1)
        values[start : start + len(row)] = drawn[:, skip : skip + columns]
    return values.mul_(std).view(region.shape)


def keep_mask(
    seed: int, name: str, sample_indices: Tensor, positions: range | Tensor, features: range, *, dropped: int
) -> Tensor:
    """Return a slice of the dropout mask `name`: bool [b, positions, features], True: keep.

    sample_indices: [b] int64. positions: a range, or those of each sample, int64 [b, n]. dropped: the drop probability
    in units of 1 / MASK_LEVELS, below MASK_LEVELS.
    An element depends on (seed, name, sample, position, feature) only, so each rank draws its own slice.
    Eight neighbouring features share the counter (feature // 8, position, sample, sample >> 32).
    """
    first = features.start // _OCTET
    octets = torch.arange(first, (features.stop - 1) // _OCTET + 1, device=sample_indices.device)
    if isinstance(positions, range):
        positions = torch.arange(positions.start, positions.stop, device=sample_indices.device)
        positions = positions.expand(len(sample_indices), -1)
    sample = sample_indices.repeat_interleave(positions.shape[1]).unsqueeze(1)
    position = positions.reshape(-1, 1)
    columns = slice(features.start - first * _OCTET, features.stop - first * _OCTET)
    key = key_of(seed, name)
    kept = torch.empty(len(sample), len(features), dtype=torch.bool, device=sample_indices.device)
    rows_per_block = max(1, _BLOCK // len(octets))
    for start in range(0, len(sample), rows_per_block):
        block = slice(start, start + rows_per_block)
        words = philox((octets, position[block], sample[block] & _MASK, sample[block] >> 32), key)
        halves = torch.stack([word.to(torch.int32) for word in words], dim=-1).view(torch.int16).flatten(1)
        # The 16-bit values are signed: the smallest is -MASK_LEVELS / 2.
        torch.ge(halves[:, columns], dropped - MASK_LEVELS // 2, out=kept[block])
    return kept.view(*positions.shape, len(features))


def _box_muller(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn four random words into four independent standard normal values (Box and Muller 1958)."""
    normals = []
    for radius_bits, angle_bits in ((a, b), (c, d)):
        # + 0.5 keeps the logarithm's argument above zero.
        radius = (radius_bits.double().add_(0.5).mul_(2.0**-32)).log_().mul_(-2.0).sqrt_()
        angle = angle_bits.double().mul_(2.0 * math.pi * 2.0**-32)
        normals += [radius * angle.cos(), radius * angle.sin()]
    return normals[0], normals[1], normals[2], normals[3]
