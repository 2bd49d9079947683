"""The batch of a step on one data-parallel rank: a pure function of the files, the seed and the samples consumed."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalite.data.blend import BlendedSamples, Rows
from megalite.data.documents import document_ids_and_positions
from megalite.data.packing import IGNORE_INDEX
from megalite.data.token_file import TokenFile, bin_path
from megalite.errors import DataError
from megalite.parallel.pipeline import StepBatch


@dataclass(frozen=True)
class LoadedBatch(StepBatch):
    """A StepBatch with the data set's sample behind each of its rows, [M * b] int64, the same in every epoch."""

    sample_ids: Tensor

    @property
    def valid_tokens(self) -> int:
        """Tokens of this rank that count in the loss."""
        return int((self.labels != IGNORE_INDEX).sum())


class StepLoader:
    """Reads, for data-parallel rank `dp_rank`, its share of each global batch of G = M * dp_size * b samples.

    The global batch after c consumed samples is places c .. c + G - 1 of the order that seed, files and weights give,
    `weights` being the share of each token file where there are several (BlendedSamples). Micro batch m of
    rank d takes b of them from m * dp_size * b + d * b, so every split of the same G covers the same samples.
    `vocab_size`, where given, is the model's: a larger id in the file is a DataError instead of a silent zero.
    `epochs`, where given, ends the data: rows of the last global batch that lie beyond have no labels.
    `end_of_document_id`, where given, tells documents apart: batches number them, and positions start anew with each.
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
        vocab_size: int | None = None,
        epochs: float | Fraction | None = None,
        end_of_document_id: int | None = None,
    ):
        files = [token_file] if isinstance(token_file, TokenFile) else token_file
        self._samples = BlendedSamples(files, weights, sequence_length, seed=seed, shuffle=shuffle)
        self._pad_id, self._vocab_size = pad_id, vocab_size
        self._end_of_document_id = end_of_document_id
        self._end = None if epochs is None else ceil(epochs * len(self._samples))
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
        """Steps until every sample was seen `epochs` times, at least one; with `after` samples, those still to do."""
        left = max(ceil(epochs * self.samples_per_epoch) - after, 0 if after else 1)
        return ceil(left / self.global_batch_size)

    def step_batch(self, samples_consumed: int, *, dtype: torch.dtype = torch.float32) -> LoadedBatch:
        """What this rank works on after `samples_consumed` samples; the loss mask is of `dtype`."""
        places = samples_consumed + self._offsets
        rows = self._samples.read(places, self._pad_id)
        self._check_ids(rows)
        input_ids, labels = rows.input_ids, rows.labels
        position_ids, document_ids = self._position_ids, None
        if self._end_of_document_id is not None:
            # While labels tell the filling of a short sample.
            documents, positions = document_ids_and_positions(input_ids, labels, self._end_of_document_id)
            position_ids, document_ids = torch.from_numpy(positions), torch.from_numpy(documents)
        if self._end is not None:
            labels[places >= self._end] = IGNORE_INDEX
        return LoadedBatch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=position_ids,
            labels=torch.from_numpy(labels),
            loss_mask=torch.from_numpy((labels != IGNORE_INDEX).astype(self._numpy_dtype(dtype))),
            samples=torch.from_numpy(places),
            document_ids=document_ids,
            sample_ids=torch.from_numpy(rows.sample_ids),
        )

    @staticmethod
    def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
        """Converted by numpy: torch, called by a loader's thread, would start a team of threads beside the model's."""
        return np.dtype(str(dtype).removeprefix("torch."))

    def _check_ids(self, rows: Rows) -> None:
        if self._vocab_size is None:
            return
        largest = np.maximum(rows.input_ids.max(axis=1), rows.labels.max(axis=1))
        if (largest >= self._vocab_size).any():
            row = int(largest.argmax())
            raise DataError(
                f"{bin_path(self._samples.token_files[rows.sets[row]].prefix)}, sample {rows.sample_ids[row]}: id "
                f"{largest[row]} is outside the model's vocabulary of {self._vocab_size}; prepare the text with the "
                "model's own tokenizer, or raise model.vocab_size"
            )
