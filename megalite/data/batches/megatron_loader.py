"""Loads the batches of data.order = "megatron"."""

from fractions import Fraction

import torch

from megalite.data.batches.blend import BatchRows
from megalite.data.batches.documents import document_ids_and_positions
from megalite.data.batches.loader import BatchShare, LoadedBatch, loaded_batch
from megalite.data.batches.megatron_order import MegatronSamples


class MegatronLoader:
    """Reads a rank's share of global batches of G samples.

    In place of StepLoader. The global batch after c consumed samples has those at places c to c + G - 1, and the rows
    of a rank are those of the same rank of Megatron (MegatronPretrainingSampler), so any layout has the same samples.
    """

    def __init__(self, samples: MegatronSamples, share: BatchShare, *, end_of_document_id: int | None = None):
        """end_of_document_id: separates documents, as Megatron's --reset-position-ids and --reset-attention-mask do;
        None: no document mask."""
        self.global_batch_size = share.global_batch_size
        self._samples, self._end_of_document_id = samples, end_of_document_id
        self._offsets = share.offsets()

    @property
    def samples_per_epoch(self) -> int:
        return self._samples.samples_per_epoch

    def steps_for_epochs(self, epochs: float | Fraction, *, after: int = 0) -> int:
        """The order depends on the number of steps; a rule asks for training.steps."""
        raise AssertionError('data.order = "megatron" counts steps, not epochs')

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype = torch.float32) -> LoadedBatch:
        """Return this rank's batch after `consumed_samples`; the loss mask has `dtype`. Raises DataError."""
        places = consumed_samples + self._offsets
        tokens = self._samples.read(places)
        rows, documents = BatchRows(tokens[:, :-1].copy(), tokens[:, 1:].copy(), places), None
        if self._end_of_document_id is not None:
            documents = document_ids_and_positions(rows.input_ids, rows.labels, self._end_of_document_id)
        return loaded_batch(rows, documents, places, dtype)
