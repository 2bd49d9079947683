"""The order of the samples: a pure function of (seed, epoch), without a list in memory and without state."""

import hashlib
from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

# With fewer rounds some orders of 5 and 6 samples are too frequent (measured over all orders).
_ROUNDS = 16
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Sampler:
    """The order of the samples over endless epochs.

    Position p, counted from the start of training, is place p % samples of epoch p // samples. The number of consumed
    samples is therefore the whole state, for any data-parallel size and batch size.
    """

    samples: int
    seed: int
    shuffle: bool = True

    def sample_ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample at each position; each epoch has every sample exactly once."""
        epochs, places = np.divmod(positions, self.samples)
        if not self.shuffle:
            return places
        ids = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            ids[chosen] = permuted(places[chosen], self.samples, _round_keys(self.seed, int(epoch)))
        return ids


def permuted(places: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Map places by a keyed permutation of range(size), in constant time and memory per place.

    A Feistel network over a x b >= size with a = ceil(sqrt(size)), repeated until the result is below `size`
    (cycle walking): Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, sections 4 and 3. Unlike numpy's
    permutations, the result does not depend on a library version.
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
    """Run all rounds over range(rows * columns); each round adds a hash of one half to the other half."""
    moduli = (np.uint64(rows), np.uint64(columns))
    right, left = np.divmod(values, moduli[0])  # left < rows, right < columns
    for index, key in enumerate(keys):
        # Reduced before the addition: a sum that wraps at 2**64 would not be a bijection.
        modulus = moduli[index % 2]
        left, right = right, (left + _mixed(right, key) % modulus) % modulus
    return right * moduli[0] + left


def _mixed(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (Steele et al. 2014) to value + key, modulo 2**64."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    digests = (
        hashlib.blake2b(f"{seed}:data:{epoch}:{index}".encode(), digest_size=8) for index in range(_ROUNDS)
    )
    return np.array([int.from_bytes(digest.digest(), "little") for digest in digests], dtype=np.uint64)
