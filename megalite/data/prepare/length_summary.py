"""The spread of the lengths in a token file, and documents that occur more than once."""

import hashlib
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from megalite.data.files.token_file import TokenFile


def length_counts(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return (shortest, longest, documents) of each power of two, from the first to the last that has documents."""
    if not len(lengths):
        return []
    # 0 and 1; then 2 to 3, 4 to 7, ...
    powers = np.frexp(np.maximum(lengths, 1))[1] - 1
    counts = np.bincount(powers)
    first = int(powers.min())
    return [
        (1 << power if power else 0, (2 << power) - 1, int(counts[power]))
        for power in range(first, len(counts))
    ]


def repeated_documents(file: TokenFile) -> Counter[int]:
    """Return document -> how many later ones have the same tokens, for those that have any; reads the whole file."""
    first: dict[bytes, int] = {}
    repeats: Counter[int] = Counter()
    for index in range(file.num_documents):
        tokens = np.ascontiguousarray(file.document(index))
        key = hashlib.blake2b(tokens.data, digest_size=16).digest()
        earlier = first.setdefault(key, index)
        if earlier != index:
            repeats[earlier] += 1
    return repeats
