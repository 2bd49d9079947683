"""The copy that an asynchronous checkpoint is written from: one buffer of host memory, reused for every save."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from megalite.checkpoint.tensor_file import tensor_bytes

# Aligned for every dtype, so that a copy begins on a cache line.
_ALIGNMENT = 64


class HostBuffer:
    """Bytes in host memory, page-locked if there is a device to copy from."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        """uint8 tensor of at least the reserved size."""
        self._device: torch.device | None = None
        self._unlock: Callable[[], object] = lambda: None

    def reserve(self, size_bytes: int, device: torch.device | None) -> None:
        """Grow to `size_bytes`, page-locked if `device` is given; the old content is lost.

        If the system refuses to lock the memory, copies still work but are synchronous.
        """
        if self.bytes.nbytes >= size_bytes and device in (None, self._device):
            return
        # Free the smaller buffer first: both together may not fit.
        self._unlock()
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._device = device
        if device is None or device.type == "cuda":
            self.bytes = torch.empty(size_bytes, dtype=torch.uint8)
        else:
            self.bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        if device is not None and device.type == "cuda" and _lock(self.bytes, device):
            self._unlock = weakref.finalize(self, _unlock, self.bytes)


class Staging:
    """Copies tensors of one rank to host memory: from an accelerator on a stream of its own, from the host in another
    thread.

    `begin` in the training's thread, then `fill` and `wait_for_device` in the writer's, and before the tensors change
    `hold_update` in the training's, once `fill` has returned.
    """

    def __init__(self) -> None:
        self._buffer = HostBuffer()
        self._on_host: list[tuple[Tensor, Tensor]] = []
        self._device: torch.device | None = None
        self._arrived: torch.Event | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer, which is kept from one save to the next."""
        return self._buffer.bytes.nbytes

    @staticmethod
    def needed_bytes(tensors: Mapping[str, Tensor]) -> int:
        return sum(_aligned(tensor.nbytes) for tensor in tensors.values())

    def begin(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy an accelerator's tensors; returns key -> the tensor that will hold the copy."""
        on_device = {key: tensor for key, tensor in tensors.items() if tensor.device.type != "cpu"}
        self._device = next((tensor.device for tensor in on_device.values()), None)
        self._buffer.reserve(self.needed_bytes(tensors), self._device)
        targets, offset = {}, 0
        for key, tensor in tensors.items():
            copy = self._buffer.bytes.narrow(0, offset, tensor.nbytes)
            targets[key] = copy.view(tensor.dtype).view(tensor.shape)
            offset += _aligned(tensor.nbytes)
        self._on_host = [(targets[key], tensor) for key, tensor in tensors.items() if key not in on_device]
        self._arrived = None
        if self._device is not None:
            stream = torch.Stream(self._device)
            stream.wait_stream(torch.accelerator.current_stream(self._device))
            with stream, torch.no_grad():
                for key, tensor in on_device.items():
                    targets[key].copy_(tensor, non_blocking=True)
                self._arrived = stream.record_event()
        return targets

    def fill(self) -> None:
        """Copy the tensors in host memory by numpy, which starts no threads and releases the GIL."""
        for target, tensor in self._on_host:
            np.copyto(
                np.frombuffer(tensor_bytes(target), np.uint8), np.frombuffer(tensor_bytes(tensor), np.uint8)
            )
        self._on_host = []

    def wait_for_device(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()

    def hold_update(self) -> None:
        """Make later work on the training's stream wait for the copy; the host does not wait."""
        if self._arrived is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._arrived)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _lock(memory: Tensor, device: torch.device) -> bool:
    """Page-lock existing memory; torch's pin_memory rounds sizes up to a power of two, up to twice the need."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):
        # CUDA would report the error at the next launch; this call takes and clears it.
        torch.ones(1, device=device)
    return False


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
