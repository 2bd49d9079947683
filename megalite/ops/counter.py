"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) and the attention dropout mask.

csrc/core/counter.h computes the same bits.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# Words per block: small enough for the CPU's cache, large enough to hide torch's overhead.
_BLOCK = 1 << 16
# The equally likely 16-bit values that decide whether an element is dropped.
MASK_LEVELS = 1 << 16


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four int64 tensors of 32-bit words from four counter words of broadcastable shapes.

    Pass the words unbroadcast: each round mixes two of them, so the first rounds are then almost free.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap, but have the same bits as the unsigned products.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            _xor((high >> 32).bitwise_and_(_MASK), c1, k0),
            high.bitwise_and_(_MASK),
            _xor((low >> 32).bitwise_and_(_MASK), c3, k1),
            low.bitwise_and_(_MASK),
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return `philox` of one counter, in plain integers: a single draw costs less than one call of torch."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK, (low >> 32) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _xor(word: Tensor, other: Tensor, key: int) -> Tensor:
    """Return word ^ other ^ key, in place of `word` if the shapes allow."""
    # torch.broadcast_shapes would be half of the time of a small draw.
    pairs = zip(reversed(other.shape), reversed(word.shape), strict=False)
    wider = other.dim() > word.dim() or any(size not in (1, there) for size, there in pairs)
    return (word ^ other if wider else word.bitwise_xor_(other)).bitwise_xor_(key)


def keep_probabilities(
    key: tuple[int, int], sample_indices: Tensor, heads: range, queries: range, keys: range, *, dropped: int
) -> Tensor:
    """Return the mask of the attention probabilities that are kept: bool [b, heads, queries, keys].

    dropped: an element is dropped for this many, fewer than all, of its MASK_LEVELS values. sample_indices: [b] int64.
    An element depends only on (key, sample, head, position of the query, position of the key).

    Each row draws two words of Philox from the counter (position, head, sample, sample >> 32): the start of the row's
    sequence and the tweak of its mixer. Each key then costs nine operations on a word, wherever a kernel's tile begins.
    """
    device = sample_indices.device
    at = [torch.arange(each.start, each.stop, device=device) for each in (queries, heads)]
    sample = sample_indices.view(-1, 1, 1)
    # Queries that see no key may have negative positions: wrap them to 32 bits.
    counter = (at[0] & _MASK, at[1].view(-1, 1), sample & _MASK, sample >> 32 & _MASK)
    start, tweak = (word.to(torch.int32).reshape(-1, 1) for word in philox(counter, key)[:2])
    steps = (torch.arange(keys.start, keys.stop, device=device) * _WEYL[0]).to(torch.int32)
    kept = torch.empty(len(start), len(keys), dtype=torch.bool, device=device)
    rows_a_block = max(1, _BLOCK // max(1, len(keys)))
    for first in range(0, len(start), rows_a_block):
        block = slice(first, first + rows_a_block)
        word = start[block] + steps
        word = _mixed(word, 16).bitwise_xor_(tweak[block]).mul_(_signed(0x7FEB352D))
        word = _mixed(word, 15).mul_(_signed(0x846CA68B))
        # Only the signed high half decides; its smallest value is -MASK_LEVELS / 2.
        torch.ge(word, (dropped - MASK_LEVELS // 2) << 16, out=kept[block])
    return kept.view(len(sample_indices), len(heads), len(queries), len(keys))


def _mixed(word: Tensor, by: int) -> Tensor:
    """Return word ^ (word >> by) of int32 words with a logical shift."""
    return (word >> by).bitwise_and_((1 << 32 - by) - 1).bitwise_xor_(word)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
