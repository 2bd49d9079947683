"""In which order samples are seen: a pure function of (seed, epoch), with no list in memory and no state."""

import hashlib
from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

# Fewer leave some orders of very small sets too frequent (measured over all orders of 5 and 6 samples).
_ROUNDS = 16
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Sampler:
    """The global order of samples, epoch after epoch without end.

    Position p of the order, counted from the start of training, is place p % samples of epoch p // samples. How many
    samples were consumed is therefore the whole state, whatever the data-parallel size or the batch size was.
    """

    samples: int
    seed: int
    shuffle: bool = True

    def sample_ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample at each position; every epoch holds each sample exactly once."""
        epochs, places = np.divmod(positions, self.samples)
        if not self.shuffle:
            return places
        ids = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            ids[chosen] = permuted(places[chosen], self.samples, _round_keys(self.seed, int(epoch)))
        return ids


def permuted(places: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where a keyed permutation of range(size) sends each place; any one costs the same, and no memory.

    A Feistel network over the smallest a x b >= size with a = ceil(sqrt(size)), walked along its cycle until it is
    back inside: Black & Rogaway, "Ciphers with arbitrary finite domains", 2002, sections 4 and 3. Its values, unlike
    numpy's permutations, do not depend on a library's version.
    """
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    result = _feistel(places.astype(np.uint64), rows, columns, keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], rows, columns, keys)
    return result.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], rows: int, columns: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """One pass of all rounds over range(rows * columns); each adds a hash of one half to the other, by turns."""
    moduli = (np.uint64(rows), np.uint64(columns))
    right, left = np.divmod(values, moduli[0])  # left < rows, right < columns
    for index, key in enumerate(keys):
        # Reduced before the sum, which would otherwise wrap at 2**64 and no longer be a bijection.
        modulus = moduli[index % 2]
        left, right = right, (left + _mixed(right, key) % modulus) % modulus
    return right * moduli[0] + left


def _mixed(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al. 2014) of value + key, which wraps."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    digests = (
        hashlib.blake2b(f"{seed}:data:{epoch}:{index}".encode(), digest_size=8) for index in range(_ROUNDS)
    )
    return np.array([int.from_bytes(digest.digest(), "little") for digest in digests], dtype=np.uint64)
