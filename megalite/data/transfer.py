"""Moves the batch of a coming step to the device while the device works on an earlier one."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.ops.documents import row_starts
from megalite.parallel.pipeline import StepBatch


@dataclass(frozen=True)
class ArrivingBatch:
    """A batch on its way to the device.

    arrived: the event behind the last copy, None on a CPU. on_host: the pinned memory that is being copied from.
    """

    batch: StepBatch
    arrived: torch.Event | None = None
    on_host: StepBatch | None = None

    def ready(self) -> StepBatch:
        """Return the batch for use on the current stream, which waits for the copy; the host does not."""
        if self.arrived is not None:
            stream = torch.accelerator.current_stream(self.batch.input_ids.device)
            stream.wait_event(self.arrived)
            for tensor in self.batch.tensors.values():
                # The memory belongs to the copying stream, and must not be given away while this one reads it.
                tensor.record_stream(stream)
        return self.batch


class BatchTransfer:
    """Copies batches from pinned host memory to an accelerator, on a stream of its own; on a CPU it copies nothing."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def start(self, batch: StepBatch) -> ArrivingBatch:
        """Begin the copy of a batch in host memory; any thread may call it."""
        if self._stream is None:
            return ArrivingBatch(batch)
        if batch.document_ids is not None:
            # While the ids are here: attention on a device would wait for them.
            batch = replace(batch, cu_seqlens=row_starts(batch.document_ids))
        with self._stream:
            on_host = batch.map(Tensor.pin_memory)
            moved = on_host.map(self._copy)
            return ArrivingBatch(moved, self._stream.record_event(), on_host)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
