"""Loads the batches of data.streaming: each row of the global batch reads a lane of the files while the run trains."""

from collections.abc import Sequence
from fractions import Fraction
from threading import Lock

import numpy as np
import torch

from megalite.data.batches.blend import BatchRows
from megalite.data.batches.bucket_loader import BucketLoader
from megalite.data.batches.documents import document_ids_and_positions
from megalite.data.batches.loader import BatchShare, LoadedBatch, StepLoader, loaded_batch
from megalite.data.batches.megatron_loader import MegatronLoader
from megalite.data.batches.stream_lane import DocumentEncoder, Lane, LanePlace, StreamText
from megalite.data.tokenizers.tokenizer import Tokenizer


class StreamLoader:
    """Reads a rank's share of global batches of G rows.

    In place of StepLoader, for documents in .jsonl and parquet files without a token file. Row r of every global batch
    comes from lane r of G, which has an equal part of the files: a rank reads the parts of its own rows, and any
    layout has the same tokens. Batches are read in order; one thread at a time reads.
    """

    def __init__(
        self,
        text: StreamText,
        tokenizer: Tokenizer,
        share: BatchShare,
        *,
        document_mask: bool = False,
        remembered: int = 1,
    ):
        """document_mask: as StepLoader's, with the tokenizer's end of document. remembered: how many of the last
        batches have a `place` and are read again at no great cost.

        Raises DataError.
        """
        self.text = text
        self.global_batch_size = share.global_batch_size
        self._offsets = share.offsets()
        encode = DocumentEncoder(tokenizer)
        self._lanes = {
            row: Lane(
                text,
                row,
                self.global_batch_size,
                encode=encode,
                sequence_length=share.sequence_length,
                remembered=remembered,
            )
            for row in self._offsets.tolist()
        }
        self._end_of_document_id = tokenizer.end_of_document_id if document_mask else None
        self._reading = Lock()

    def steps_for_epochs(self, epochs: float | Fraction, *, after: int = 0) -> int:
        """A stream has no known length; a rule asks for training.steps."""
        raise AssertionError("data.streaming counts steps, not epochs")

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype = torch.float32) -> LoadedBatch:
        """Return this rank's batch after `consumed_samples`; the loss mask has `dtype`. Raises DataError."""
        sequence = consumed_samples // self.global_batch_size
        with self._reading:
            tokens = np.stack([lane.sequence(sequence) for lane in self._lanes.values()])
        places = consumed_samples + self._offsets
        rows, documents = BatchRows(tokens[:, :-1].copy(), tokens[:, 1:].copy(), places), None
        if self._end_of_document_id is not None:
            documents = document_ids_and_positions(rows.input_ids, rows.labels, self._end_of_document_id)
        return loaded_batch(rows, documents, places, dtype)

    def places(self, consumed_samples: int) -> dict[int, LanePlace]:
        """Return lane -> where it stands after `consumed_samples`, of this rank's lanes."""
        sequence = consumed_samples // self.global_batch_size
        with self._reading:
            return {row: lane.place(sequence) for row, lane in self._lanes.items()}

    def go_on(self, consumed_samples: int, places: Sequence[LanePlace] | None = None) -> None:
        """Let the batch after `consumed_samples` begin at `places`, those of all G lanes; None: where lanes begin."""
        sequence = consumed_samples // self.global_batch_size
        with self._reading:
            for row, lane in self._lanes.items():
                lane.go_on(sequence, None if places is None else places[row])


TrainingLoader = StepLoader | BucketLoader | MegatronLoader | StreamLoader
"""A loader of training batches."""
