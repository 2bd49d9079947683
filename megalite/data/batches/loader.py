"""Loads the batch of a step: a pure function of the files, the seed and the samples consumed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalite.data.batches.blend import BatchRows, BlendedSamples, SampleOrder
from megalite.data.batches.documents import document_ids_and_positions, documents_of
from megalite.data.batches.packing import IGNORE_INDEX, PackedSamples, Samples
from megalite.data.files.token_file import TokenFile
from megalite.parallel.step_batch import StepBatch


@dataclass(frozen=True)
class LoadedBatch(StepBatch):
    """A StepBatch with the data set's sample of each row: sample_ids [M * b] int64, the same in every epoch."""

    sample_ids: Tensor


@dataclass(frozen=True)
class BatchShare:
    """The rows that one data-parallel rank reads of each global batch of G = M * dp_size * b rows of S positions.

    sequence_length: S. micro_batch_size: b. micro_batches: M. dp_rank, dp_size: rank and size of `mesh.batch`, the
    ranks that read different samples.
    """

    sequence_length: int
    micro_batch_size: int
    micro_batches: int
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def global_batch_size(self) -> int:
        return self.micro_batches * self.dp_size * self.micro_batch_size

    def offsets(self, rows: int = 1) -> NDArray[np.int64]:
        """Return the places of the rank's rows in a global batch with `rows` rows for each of S positions."""
        micro_rows = self.micro_batch_size * rows
        starts = (np.arange(self.micro_batches) * self.dp_size + self.dp_rank) * micro_rows
        offsets: NDArray[np.int64] = (starts[:, None] + np.arange(micro_rows)).ravel()
        return offsets


class StepLoader:
    """Reads a rank's share of each global batch of G samples.

    The global batch after c consumed samples is samples c to c + G - 1 of the training order (BlendedSamples). Micro
    batch m of rank d has b of them, from m * dp_size * b + d * b on, so every split of G covers the same samples.
    After the last epoch of `order` the rows of the last global batch have no labels.
    samples_of: makes the samples of a file; those of ConversationRows know their documents.
    pad_id: fills up short samples. document_mask: `pad_id` separates documents: the batch has document_ids, and
        position_ids restart with each document.
    """

    def __init__(
        self,
        token_file: TokenFile | Sequence[TokenFile],
        share: BatchShare,
        order: SampleOrder,
        *,
        samples_of: Callable[[TokenFile, int], Samples] = PackedSamples,
        pad_id: int = 0,
        document_mask: bool = False,
    ):
        self.reference_losses: NDArray[np.float64] | None = None
        """The loss sum of each sample under the reference model, which batches then have; set before the first step."""
        self.token_files = [token_file] if isinstance(token_file, TokenFile) else token_file
        """The files, in the order of the sample_ids."""
        self.global_batch_size = share.global_batch_size
        samples = [samples_of(file, share.sequence_length) for file in self.token_files]
        self._samples = BlendedSamples(samples, order, self.global_batch_size)
        self._together, self._pad_id, self._document_mask = order.together, pad_id, document_mask
        self._end = None if order.epochs is None else self.samples_in(order.epochs)
        self._offsets = share.offsets()

    @property
    def samples_per_epoch(self) -> int:
        return len(self._samples)

    def steps_for_epochs(self, epochs: float | Fraction, *, after: int = 0) -> int:
        """Return the steps of `epochs` epochs, at least one; with `after` consumed samples, the remaining steps."""
        remaining = max(self.samples_in(epochs) - after, 0 if after else 1)
        return ceil(remaining / self.global_batch_size)

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype = torch.float32) -> LoadedBatch:
        """Return this rank's batch after `consumed_samples`; the loss mask has `dtype`."""
        places = consumed_samples + self._offsets
        rows, documents = self._samples.read(places, self._pad_id), None
        if rows.begins is not None:
            documents = documents_of(rows.begins)
        elif self._document_mask:
            # Before `epochs` masks labels, so that IGNORE_INDEX still means padding only.
            documents = document_ids_and_positions(rows.input_ids, rows.labels, self._pad_id)
        if self._end is not None:
            rows.labels[places >= self._end] = IGNORE_INDEX
        losses = self.reference_losses
        reference = None if losses is None else torch.from_numpy(losses[rows.sample_ids])
        return loaded_batch(rows, documents, places, dtype, reference)

    def samples_in(self, epochs: float | Fraction) -> int:
        """Return the samples of so many epochs, rounded up."""
        # As the number was written: 1.1 x 100 is 110, while its nearest float gives a little more.
        return ceil(Fraction(str(epochs)) * len(self._samples) / self._together) * self._together


@lru_cache(maxsize=4)
def _positions(rows: int, length: int) -> NDArray[np.int64]:
    """Return the positions of rows without documents; the batches of a run share them."""
    return np.tile(np.arange(length), (rows, 1))


def loaded_batch(
    rows: BatchRows,
    documents: tuple[NDArray[np.int64], NDArray[np.int64]] | None,
    places: NDArray[np.int64],
    dtype: torch.dtype,
    reference: Tensor | None = None,
) -> LoadedBatch:
    """Return the batch of rows [M * b, S]; the loss mask, of `dtype`, leaves out the labels IGNORE_INDEX.

    documents: the document and the position of each token; None: no document mask. places: of the rows in the order of
    training. reference: the loss sum of each row under the reference model, if there is one.
    """
    document_ids, positions = documents or (None, _positions(*rows.labels.shape))
    padded = rows.lengths is not None and bool((rows.lengths < rows.labels.shape[1]).any())
    return LoadedBatch(
        input_ids=torch.from_numpy(rows.input_ids),
        position_ids=torch.from_numpy(positions),
        labels=torch.from_numpy(rows.labels),
        loss_mask=torch.from_numpy((rows.labels != IGNORE_INDEX).astype(_numpy_dtype(dtype))),
        sample_indices=torch.from_numpy(places),
        document_ids=None if document_ids is None else torch.from_numpy(document_ids),
        sample_ids=torch.from_numpy(rows.sample_ids),
        lengths=torch.from_numpy(rows.lengths) if padded else None,
        reference=reference,
    )


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return numpy's dtype. Torch would start a second OpenMP thread team if a loader thread converted with it."""
    return np.dtype(str(dtype).removeprefix("torch."))
