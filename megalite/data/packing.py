"""Samples of equal length, cut from the documents of a token file laid end to end."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalite.data.token_file import TokenFile
from megalite.errors import DataError

# What the loss leaves out, as Hugging Face and torch have it.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class PackedSamples:
    """Sample i reads tokens i * S up to (i + 1) * S and predicts each one's successor, across documents.

    Neighbours share one token (the last label, the first input), so every token but the first is predicted exactly
    once an epoch. The last sample may be short: it is filled up and its filling is not counted.
    """

    token_file: TokenFile
    sequence_length: int

    def __post_init__(self) -> None:
        if self.token_file.num_tokens < 2:
            raise DataError(
                f"{self.token_file.prefix} holds {self.token_file.num_tokens} tokens; prepare a longer text"
            )

    def __len__(self) -> int:
        return -(-(self.token_file.num_tokens - 1) // self.sequence_length)

    def read(self, sample_ids: NDArray[np.int64], pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """input_ids and labels of the samples, [len(sample_ids), S] each; IGNORE_INDEX labels the filling."""
        length = self.sequence_length
        input_ids = np.full((len(sample_ids), length), pad_id, dtype=np.int64)
        labels = np.full((len(sample_ids), length), IGNORE_INDEX, dtype=np.int64)
        for row, sample in enumerate(sample_ids.tolist()):
            window = self.token_file.tokens[sample * length : (sample + 1) * length + 1]
            input_ids[row, : len(window) - 1] = window[:-1]
            labels[row, : len(window) - 1] = window[1:]
        return input_ids, labels
