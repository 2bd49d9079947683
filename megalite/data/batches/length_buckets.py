"""Length buckets: unpacked conversations of similar length, for batches that are padded little."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalite.config.sections.derived import bucket_multiple
from megalite.data.batches.conversation_rows import require_short
from megalite.data.files.token_file import TokenFile


@dataclass(frozen=True)
class Bucket:
    """Conversations that are padded to `length` positions.

    members: their indices, ascending. rows: the sequences of a global batch of this bucket, over all replicas.
    """

    length: int
    rows: int
    members: NDArray[np.int64]


def buckets_of(file: TokenFile, sequence_length: int, global_batch_size: int, count: int) -> list[Bucket]:
    """Return the length buckets of a file of conversations. Raises DataError if one is longer than sequence_length."""
    require_short(file, sequence_length)
    return length_buckets(file.document_lengths - 1, sequence_length, global_batch_size, count)


def length_buckets(
    lengths: NDArray[np.int64], sequence_length: int, global_batch_size: int, count: int
) -> list[Bucket]:
    """Return at most `count` buckets, by rising length, that have the least padding; the last fits the longest.

    A global batch of length L has global_batch_size * (sequence_length // L) rows: it is never larger than one of
    sequence_length, and every split of the global batch over micro batches and replicas divides the rows. A bucket has
    conversations for at least one global batch without repeating one; where none has, there is one bucket for all.
    lengths: [conversations] in positions, 1 to sequence_length each.
    """
    multiple = bucket_multiple(sequence_length)
    longest = -(-int(lengths.max()) // multiple)
    candidates = np.minimum(sequence_length, np.arange(1, longest + 1) * multiple)
    counts = np.bincount(np.searchsorted(candidates, lengths), minlength=longest)
    rows = global_batch_size * (sequence_length // candidates)
    chosen = _least_padding(candidates, counts, rows, count)
    numbers = np.searchsorted(candidates[chosen], lengths)
    return [
        Bucket(int(candidates[candidate]), int(rows[candidate]), np.flatnonzero(numbers == number))
        for number, candidate in enumerate(chosen)
    ]


def fill(lengths: NDArray[np.int64], buckets: Sequence[Bucket]) -> float:
    """Return the share of all positions of the buckets that hold a token."""
    return float(lengths.sum() / sum(len(bucket.members) * bucket.length for bucket in buckets))


def _least_padding(
    candidates: NDArray[np.int64], counts: NDArray[np.int64], rows: NDArray[np.int64], most: int
) -> list[int]:
    """Return the indices of the chosen candidates, the last one included, by dynamic programming over their number."""
    total = len(candidates)
    before = np.concatenate([[0], np.cumsum(counts)])
    # held[i, j]: conversations of candidates i to j; cost[i, j]: the positions of a bucket of them.
    members = before[None, 1:] - before[:-1, None]
    cost = np.where(members >= rows[None, :], members * candidates[None, :].astype(float), np.inf)
    cost[np.tril_indices(total, -1)] = np.inf
    best, froms = cost[0], []
    least, used = best[-1], 1
    costs = [best]
    for number in range(2, min(most, total) + 1):
        through = costs[-1][:-1, None] + cost[1:]  # the last bucket begins behind i
        froms.append(through.argmin(axis=0))
        costs.append(through.min(axis=0))
        if costs[-1][-1] < least:
            least, used = costs[-1][-1], number
    chosen = [total - 1]
    for number in range(used - 1, 0, -1):
        chosen.append(int(froms[number - 1][chosen[-1]]))
    return chosen[::-1]
