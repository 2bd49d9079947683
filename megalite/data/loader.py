"""The batch of a step on one data-parallel rank: a pure function of the files, the seed and the samples consumed."""

from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalite.data.packing import IGNORE_INDEX, PackedSamples
from megalite.data.sampler import Sampler
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

    The global batch after c consumed samples is positions c .. c + G - 1 of the sampler's order. Micro batch m of
    rank d takes b of them from m * dp_size * b + d * b, so every split of the same G covers the same samples.
    `vocab_size`, where given, is the model's: a larger id in the file is a DataError instead of a silent zero.
    `epochs`, where given, ends the data: rows of the last global batch that lie beyond have no labels.
    """

    def __init__(
        self,
        token_file: TokenFile,
        *,
        sequence_length: int,
        micro_batch_size: int,
        micro_batches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int,
        shuffle: bool = True,
        pad_id: int = 0,
        vocab_size: int | None = None,
        epochs: float | None = None,
    ):
        self._samples = PackedSamples(token_file, sequence_length)
        self._sampler = Sampler(len(self._samples), seed, shuffle)
        self._pad_id, self._vocab_size = pad_id, vocab_size
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

    def steps_for_epochs(self, epochs: float) -> int:
        """Steps until every sample was seen `epochs` times."""
        return max(1, ceil(epochs * self.samples_per_epoch / self.global_batch_size))

    def step_batch(self, samples_consumed: int, *, dtype: torch.dtype = torch.float32) -> LoadedBatch:
        """What this rank works on after `samples_consumed` samples; the loss mask is of `dtype`."""
        places = samples_consumed + self._offsets
        sample_ids = self._sampler.sample_ids(places)
        input_ids, labels = self._samples.read(sample_ids, self._pad_id)
        self._check_ids(input_ids, labels, sample_ids)
        if self._end is not None:
            labels[places >= self._end] = IGNORE_INDEX
        return LoadedBatch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=self._position_ids,
            labels=torch.from_numpy(labels),
            loss_mask=torch.from_numpy(labels != IGNORE_INDEX).to(dtype),
            samples=torch.from_numpy(places),
            sample_ids=torch.from_numpy(sample_ids),
        )

    def _check_ids(
        self, input_ids: NDArray[np.int64], labels: NDArray[np.int64], sample_ids: NDArray[np.int64]
    ) -> None:
        if self._vocab_size is None:
            return
        largest = np.maximum(input_ids.max(axis=1), labels.max(axis=1))
        if (largest >= self._vocab_size).any():
            row = int(largest.argmax())
            raise DataError(
                f"{bin_path(self._samples.token_file.prefix)}, sample {sample_ids[row]}: id {largest[row]} is outside "
                f"the model's vocabulary of {self._vocab_size}; prepare the text with the model's own tokenizer"
            )
