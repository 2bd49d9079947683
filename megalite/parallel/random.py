"""Random numbers that are a pure function of (seed, name, step, global index), whatever rank draws them.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). There is no
stream to carry or save: a rank draws the slice it holds, and all layouts agree on every element.
"""

import hashlib
import math

import torch
from torch import Tensor

from megalite.topology.sharding import Box

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# Counters worked on at once: small enough for a cache, large enough that torch's overhead does not count.
_BLOCK = 1 << 16


def key_of(seed: int, name: str) -> tuple[int, int]:
    """The two 32-bit words of a generator key."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four int64 tensors of 32-bit words from four counter words of the same (broadcastable) shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap, but their bits are those of the unsigned product.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ c1 ^ k0,
            high & _MASK,
            ((low >> 32) & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def normal_box(seed: int, name: str, box: Box, std: float, *, step: int = 0) -> Tensor:
    """The region `box` of a normal tensor called `name`: float64, mean 0, standard deviation `std`.

    Four neighbouring columns share a counter (column // 4, row, row >> 32, step); a dim beyond the second would
    need a wider counter, so boxes have one or two.
    """
    rows, columns = box.shape if len(box.shape) == 2 else (1, box.shape[0])
    first_row, first_column = box.offsets if len(box.shape) == 2 else (0, box.offsets[0])
    first_quad, last_quad = first_column // 4, (first_column + columns - 1) // 4
    quads = torch.arange(first_quad, last_quad + 1)
    key = key_of(seed, name)
    values = torch.empty(rows, columns, dtype=torch.float64)
    skip = first_column - first_quad * 4
    rows_a_block = max(1, _BLOCK // len(quads))
    for start in range(0, rows, rows_a_block):
        row = torch.arange(first_row + start, first_row + min(start + rows_a_block, rows)).unsqueeze(1)
        counter = torch.broadcast_tensors(quads, row & _MASK, row >> 32, torch.tensor(step))
        drawn = torch.stack(_box_muller(*philox(counter, key)), dim=-1).flatten(1)
        values[start : start + len(row)] = drawn[:, skip : skip + columns]
    return values.mul_(std).view(box.shape)


def _box_muller(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four independent standard normal values from four words (Box and Muller 1958)."""
    normals = []
    for radius_bits, angle_bits in ((a, b), (c, d)):
        # + 0.5 keeps the logarithm's argument above zero.
        radius = (radius_bits.double().add_(0.5).mul_(2.0**-32)).log_().mul_(-2.0).sqrt_()
        angle = angle_bits.double().mul_(2.0 * math.pi * 2.0**-32)
        normals += [radius * angle.cos(), radius * angle.sin()]
    return normals[0], normals[1], normals[2], normals[3]
