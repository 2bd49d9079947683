"""Packed samples: a token file, as one sequence of tokens, cut into samples of equal length."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.data.files.token_file import TokenFile
from megalite.errors import DataError

# The label that the loss ignores, as in torch and Hugging Face.
IGNORE_INDEX = -100


class SampleRows(NamedTuple):
    """Samples as rows: int64 [rows, S] each. begins: bool [rows, S], where a document begins; None: not known.

    lengths: int64 [rows], the positions with a token, in front of the padding.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    begins: NDArray[np.bool_] | None
    lengths: NDArray[np.int64]


class Samples(Protocol):
    """The samples of one data set, each of `sequence_length` tokens."""

    @property
    def sequence_length(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, sample_ids: NDArray[np.int64], pad_id: int) -> SampleRows:
        """Return the samples; the label of padding is IGNORE_INDEX."""
        ...


@dataclass(frozen=True)
class PackedSamples:
    """Sample i has tokens i * S to (i + 1) * S - 1 as inputs and their successors as labels, across documents.

    The last label of a sample is the first input of the next one, so each token but the first is predicted exactly once
    per epoch. The last sample may be short: it is padded, and the loss ignores the padding.
    """

    token_file: TokenFile
    sequence_length: int

    def __post_init__(self) -> None:
        if self.token_file.num_tokens < 2:
            raise DataError(
                f"{self.token_file.prefix} holds {self.token_file.num_tokens} tokens, fewer than the 2 of a sample; "
                "prepare a longer text"
            )

    def __len__(self) -> int:
        return -(-(self.token_file.num_tokens - 1) // self.sequence_length)

    def read(self, sample_ids: NDArray[np.int64], pad_id: int) -> SampleRows:
        """Return the samples; the label of padding is IGNORE_INDEX."""
        length = self.sequence_length
        input_ids = np.full((len(sample_ids), length), pad_id, dtype=np.int64)
        labels = np.full((len(sample_ids), length), IGNORE_INDEX, dtype=np.int64)
        for row, sample in enumerate(sample_ids.tolist()):
            window = self.token_file.tokens[sample * length : (sample + 1) * length + 1]
            input_ids[row, : len(window) - 1] = window[:-1]
            labels[row, : len(window) - 1] = window[1:]
        # No label of a text is left out but those of padding.
        return SampleRows(input_ids, labels, None, (labels != IGNORE_INDEX).sum(axis=1))
