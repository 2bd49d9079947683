"""Loads the batch of a step: a pure function of the files, the seed and the samples consumed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalite.data.batches.blend import BlendedSamples, WeightChange
from megalite.data.batches.documents import document_ids_and_positions, documents_of
from megalite.data.batches.packing import IGNORE_INDEX, PackedSamples, Samples
from megalite.data.files.token_file import TokenFile
from megalite.parallel.step_batch import StepBatch


@dataclass(frozen=True)
class LoadedBatch(StepBatch):
    """A StepBatch with the data set's sample of each row: sample_ids [M * b] int64, the same in every epoch."""

    sample_ids: Tensor

    @property
    def valid_tokens(self) -> int:
        """The number of tokens of this rank in the loss."""
        return int((self.labels != IGNORE_INDEX).sum())


class StepLoader:
    """Reads the share of data-parallel rank `dp_rank` in each global batch of G = M * dp_size * b samples.

    The global batch after c consumed samples is samples c to c + G - 1 of the training order (BlendedSamples). Micro
    batch m of rank d has b of them, from m * dp_size * b + d * b on, so every split of G covers the same samples.

    dp_rank, dp_size: rank and size of `mesh.batch`, the ranks that read different samples.
    weights: the share of each token file.
    curriculum: (step, weights): the weights of the token files from this step on, counted from 1.
    epochs: the end of the data; later rows of the last global batch have no labels. None: no end.
    end_of_document_id: separates documents: the batch has document_ids, and position_ids restart with each document.
        None: no document mask.
    samples_of: makes the samples of a file; those of ConversationRows know their documents.
    together: samples that stay side by side in the order, as the two answers of a pair; divides b.
    """

    def __init__(
        self,
        token_file: TokenFile | Sequence[TokenFile],
        *,
        weights: Sequence[float] = (1.0,),
        curriculum: Sequence[tuple[int, Sequence[float]]] = (),
        sequence_length: int,
        micro_batch_size: int,
        micro_batches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int,
        shuffle: bool = True,
        pad_id: int = 0,
        epochs: float | Fraction | None = None,
        end_of_document_id: int | None = None,
        samples_of: Callable[[TokenFile, int], Samples] = PackedSamples,
        together: int = 1,
    ):
        self.reference_losses: NDArray[np.float64] | None = None
        """The loss sum of each sample under the reference model, which batches then have; set before the first step."""
        files = [token_file] if isinstance(token_file, TokenFile) else token_file
        self.global_batch_size = micro_batches * dp_size * micro_batch_size
        self._samples = BlendedSamples(
            files,
            weights,
            sequence_length,
            seed=seed,
            shuffle=shuffle,
            changes=[WeightChange((step - 1) * self.global_batch_size, later) for step, later in curriculum],
            samples_of=samples_of,
            together=together,
        )
        self._together = together
        self._pad_id = pad_id
        self._end_of_document_id = end_of_document_id
        self._end = None if epochs is None else self.samples_in(epochs)
        self._offsets = rank_offsets(micro_batches, micro_batch_size, dp_rank, dp_size)
        positions = torch.arange(sequence_length).expand(len(self._offsets), sequence_length)
        self._position_ids = positions.contiguous()

    @property
    def token_files(self) -> Sequence[TokenFile]:
        """The files, in the order of the sample_ids."""
        return self._samples.token_files

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
        rows = self._samples.read(places, self._pad_id)
        input_ids, labels = rows.input_ids, rows.labels
        position_ids, document_ids = self._position_ids, None
        found = None
        if rows.begins is not None:
            found = documents_of(rows.begins)
        elif self._end_of_document_id is not None:
            # Before `epochs` masks labels, so that IGNORE_INDEX still means padding only.
            found = document_ids_and_positions(input_ids, labels, self._end_of_document_id)
        if found is not None:
            documents, positions = found
            position_ids, document_ids = torch.from_numpy(positions), torch.from_numpy(documents)
        if self._end is not None:
            labels[places >= self._end] = IGNORE_INDEX
        known = self.reference_losses
        return loaded_batch(
            input_ids,
            labels,
            positions=position_ids,
            documents=document_ids,
            places=places,
            sample_ids=rows.sample_ids,
            dtype=dtype,
            reference=None if known is None else torch.from_numpy(known[rows.sample_ids]),
        )

    def samples_in(self, epochs: float | Fraction) -> int:
        """Return the samples of so many epochs, rounded up."""
        # As the number was written: 1.1 x 100 is 110, while its nearest float gives a little more.
        return ceil(Fraction(str(epochs)) * len(self._samples) / self._together) * self._together


def rank_offsets(micro_batches: int, rows: int, dp_rank: int, dp_size: int) -> NDArray[np.int64]:
    """Return which rows of a global batch data-parallel rank `dp_rank` has: [micro_batches * rows]."""
    starts = np.arange(micro_batches) * (dp_size * rows) + dp_rank * rows
    offsets: NDArray[np.int64] = (starts[:, None] + np.arange(rows)).ravel()
    return offsets


def loaded_batch(
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    *,
    positions: Tensor,
    documents: Tensor | None,
    places: NDArray[np.int64],
    sample_ids: NDArray[np.int64],
    dtype: torch.dtype,
    reference: Tensor | None = None,
) -> LoadedBatch:
    """Return the batch of rows [M * b, S]; the loss mask, of `dtype`, leaves out the labels IGNORE_INDEX.

    reference: the loss sum of each row under the reference model, if there is one.
    """
    return LoadedBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=positions,
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy((labels != IGNORE_INDEX).astype(_numpy_dtype(dtype))),
        sample_indices=torch.from_numpy(places),
        document_ids=documents,
        sample_ids=torch.from_numpy(sample_ids),
        reference=reference,
    )


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return numpy's dtype. Torch would start a second OpenMP thread team if a loader thread converted with it."""
    return np.dtype(str(dtype).removeprefix("torch."))
