"""Loads batches of a length bucket each: the same token budget a step, in fewer or more rows of one length."""

from fractions import Fraction
from math import ceil

import numpy as np
import torch

from megalite.data.batches.blend import BatchRows, SetOrder, seed_of_set, whole_shares
from megalite.data.batches.conversation_rows import rows_of_tokens
from megalite.data.batches.documents import documents_of
from megalite.data.batches.length_buckets import buckets_of
from megalite.data.batches.loader import BatchShare, LoadedBatch, loaded_batch
from megalite.data.batches.sampler import Sampler
from megalite.data.files.token_file import TokenFile


class BucketLoader:
    """Reads a rank's share of global batches of one length bucket each.

    In place of StepLoader, for one file of conversations with data.packing = "none". A global batch is up to
    G = M * dp_size * b rows of S positions: with length L it has G * (S // L) rows, and a micro batch b * (S // L).
    `consumed_samples` counts G a step, whatever the rows. The buckets take turns in proportion to their batches, as the
    sets of a blend do, and each has its own epochs: any step can be read alone, in any layout.
    """

    def __init__(
        self, token_file: TokenFile, share: BatchShare, *, buckets: int, seed: int, shuffle: bool = True
    ):
        """buckets: data.length_buckets. Raises DataError for conversations longer than sequence_length."""
        self.global_batch_size = share.global_batch_size
        self._file = token_file
        self._buckets = buckets_of(token_file, share.sequence_length, self.global_batch_size, buckets)
        repeats = [share.sequence_length // bucket.length for bucket in self._buckets]
        slots = [
            Fraction(len(bucket.members), repeat)
            for bucket, repeat in zip(self._buckets, repeats, strict=True)
        ]
        self._order = SetOrder(whole_shares([float(slot) for slot in slots]))
        self._slots = sum(slots)
        self._most_rows = max(bucket.rows for bucket in self._buckets)
        self._samplers = [
            Sampler(len(bucket.members), seed_of_set(seed, number), shuffle)
            for number, bucket in enumerate(self._buckets)
        ]
        self._offsets = [share.offsets(repeat) for repeat in repeats]

    @property
    def samples_per_epoch(self) -> int:
        """The rows of S positions that hold an epoch: an epoch has this divided by G steps."""
        return ceil(self._slots)

    def steps_for_epochs(self, epochs: float | Fraction, *, after: int = 0) -> int:
        """Return the steps of `epochs` epochs, at least one; with `after` consumed samples, the remaining steps.

        They end within one batch of each bucket from the end of its epochs.
        """
        steps = ceil(Fraction(str(epochs)) * self._slots / self.global_batch_size)
        done = after // self.global_batch_size
        return max(steps - done, 0 if after else 1)

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype = torch.float32) -> LoadedBatch:
        """Return this rank's batch after `consumed_samples`: [M * b * (S // L), L]; the loss mask has `dtype`."""
        step = consumed_samples // self.global_batch_size
        [number], [turn] = self._order.look_up(np.array([step]))
        bucket, offsets = self._buckets[number], self._offsets[number]
        ids = bucket.members[self._samplers[number].sample_ids(turn * bucket.rows + offsets)]
        samples = rows_of_tokens([[self._file.document(number)] for number in ids.tolist()], bucket.length, 0)
        assert samples.begins is not None
        rows = BatchRows(samples.input_ids, samples.labels, ids, lengths=samples.lengths)
        return loaded_batch(rows, documents_of(samples.begins), step * self._most_rows + offsets, dtype)
