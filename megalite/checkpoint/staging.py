"""The copy that a checkpoint is written from while training goes on: one buffer of host memory, used ever again."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from megalite.checkpoint.tensor_file import tensor_bytes

# Wide enough for every type, and a copy begins on a cache line.
_ALIGNMENT = 64


class Staging:
    """Copies tensors of one rank to host memory, from a GPU on a stream of its own, from the host in another thread.

    `begin` in the training's thread, then `fill` and `wait_for_device` in the writer's, and before the tensors change
    `hold_update` in the training's, once `fill` has returned.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._on_host: list[tuple[Tensor, Tensor]] = []
        self._arrived: torch.cuda.Event | None = None

    @property
    def size_bytes(self) -> int:
        """Held from the first copy to the last."""
        return self._buffer.nbytes

    @staticmethod
    def needed_bytes(tensors: Mapping[str, Tensor]) -> int:
        return sum(_aligned(tensor.nbytes) for tensor in tensors.values())

    def begin(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where the copies will be; those of a GPU's tensors are under way."""
        on_device = [tensor for tensor in tensors.values() if tensor.is_cuda]
        self._reserve(self.needed_bytes(tensors), pinned=bool(on_device))
        targets, offset = {}, 0
        for key, tensor in tensors.items():
            held = self._buffer.narrow(0, offset, tensor.nbytes)
            targets[key] = held.view(tensor.dtype).view(tensor.shape)
            offset += _aligned(tensor.nbytes)
        self._on_host = [(targets[key], tensor) for key, tensor in tensors.items() if not tensor.is_cuda]
        self._arrived = None
        if on_device:
            stream = torch.cuda.Stream(on_device[0].device)
            stream.wait_stream(torch.cuda.current_stream(on_device[0].device))
            with torch.cuda.stream(stream), torch.no_grad():
                for key, tensor in tensors.items():
                    if tensor.is_cuda:
                        targets[key].copy_(tensor, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record(stream)
        return targets

    def fill(self) -> None:
        """Copy what lies in host memory: by numpy, whose copies start no threads and let others run."""
        for target, tensor in self._on_host:
            np.copyto(
                np.frombuffer(tensor_bytes(target), np.uint8), np.frombuffer(tensor_bytes(tensor), np.uint8)
            )
        self._on_host = []

    def wait_for_device(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()

    def hold_update(self) -> None:
        """Have what the training's stream is given from now on wait for the copy; the host does not wait."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)

    def _reserve(self, size_bytes: int, *, pinned: bool) -> None:
        if self._buffer.nbytes >= size_bytes and (self._pinned or not pinned):
            return
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
        # The smaller one goes first: the two would not fit, perhaps.
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._buffer, self._pinned = torch.empty(size_bytes, dtype=torch.uint8), pinned
        if pinned:
            # torch's own pinned memory comes in powers of two. Without a lock the copies are right, but not beside
            # the training.
            code = torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), size_bytes, 0)
            self._pinned = int(code) == 0


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
