"""Copies the batch of a coming step to the device while the device computes an earlier step."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.ops.documents import longest_document, row_cu_seqlens
from megalite.parallel.step_batch import StepBatch


@dataclass(frozen=True)
class ArrivingBatch:
    """A batch whose copy to the device may be in progress.

    arrived: the event after the last copy; None on a CPU. on_host: the pinned source, kept alive during the copy.
    """

    batch: StepBatch
    arrived: torch.Event | None = None
    on_host: StepBatch | None = None

    def ready(self) -> StepBatch:
        """Return the batch for use on the current stream; the stream waits for the copy, the host does not."""
        if self.arrived is not None:
            stream = torch.accelerator.current_stream(self.batch.input_ids.device)
            stream.wait_event(self.arrived)
            for tensor in replace(self.batch, blocks=None).tensors.values():
                # The allocator must not reuse the copy stream's memory while this stream reads it.
                tensor.record_stream(stream)
        return self.batch


class BatchTransfer:
    """Copies batches from pinned host memory to an accelerator on a separate stream; copies nothing on a CPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def start(self, batch: StepBatch) -> ArrivingBatch:
        """Start copying a batch from host memory; thread-safe."""
        if self._stream is None:
            return ArrivingBatch(batch)
        if batch.document_ids is not None:
            # Computed on the host, because computing them on a device needs a device sync.
            places = row_cu_seqlens(batch.document_ids)
            longest = longest_document(places, batch.document_ids.shape[1])
            batch = replace(batch, cu_seqlens=places, max_seqlen=longest)
        with self._stream:
            on_host = batch.map(Tensor.pin_memory)
            moved = on_host.on_device(self._copy)
            return ArrivingBatch(moved, self._stream.record_event(), on_host)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
