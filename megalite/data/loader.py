"""Loads the batch of a step: a pure function of the files, the seed and the samples consumed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalite.data.blend import BlendedSamples
from megalite.data.documents import document_ids_and_positions, documents_of
from megalite.data.packing import IGNORE_INDEX, PackedSamples, Samples
from megalite.data.token_file import TokenFile
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
    epochs: the end of the data; later rows of the last global batch have no labels. None: no end.
    end_of_document_id: separates documents: the batch has document_ids, and position_ids restart with each document.
        None: no document mask.
    samples_of: makes the samples of a file; those of ConversationRows know their documents.
    """

    def __init__(
        self,
        token_file: TokenFile | Sequence[TokenFile],
        *,
        weights: Sequence[float] = (1.0,),
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
    ):
        files = [token_file] if isinstance(token_file, TokenFile) else token_file
        self._samples = BlendedSamples(
            files, weights, sequence_length, seed=seed, shuffle=shuffle, samples_of=samples_of
        )
        self._pad_id = pad_id
        self._end_of_document_id = end_of_document_id
        self._end = None if epochs is None else self._samples_in(epochs)
        self.global_batch_size = micro_batches * dp_size * micro_batch_size
        micro_batch_starts = (
            np.arange(micro_batches) * (dp_size * micro_batch_size) + dp_rank * micro_batch_size
        )
        self._offsets = (micro_batch_starts[:, None] + np.arange(micro_batch_size)).ravel()
        positions = torch.arange(sequence_length).expand(len(self._offsets), sequence_length)
        self._position_ids = positions.contiguous()

    @property
    def samples_per_epoch(self) -> int:
        return len(self._samples)

    def steps_for_epochs(self, epochs: float | Fraction, *, after: int = 0) -> int:
        """Return the steps of `epochs` epochs, at least one; with `after` consumed samples, the remaining steps."""
        remaining = max(self._samples_in(epochs) - after, 0 if after else 1)
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
        return LoadedBatch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=position_ids,
            labels=torch.from_numpy(labels),
            loss_mask=torch.from_numpy((labels != IGNORE_INDEX).astype(self._numpy_dtype(dtype))),
            sample_indices=torch.from_numpy(places),
            document_ids=document_ids,
            sample_ids=torch.from_numpy(rows.sample_ids),
        )

    def _samples_in(self, epochs: float | Fraction) -> int:
        # As the number was written: 1.1 x 100 is 110, while its nearest float gives a little more.
        return ceil(Fraction(str(epochs)) * len(self._samples))

    @staticmethod
    def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
        """Return numpy's dtype. Torch would start a second OpenMP thread team if a loader thread converted with it."""
        return np.dtype(str(dtype).removeprefix("torch."))
