"""A host buffer that an accelerator can copy to asynchronously."""

import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor


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
