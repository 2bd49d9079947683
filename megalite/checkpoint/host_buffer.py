"""One buffer of host memory that an accelerator can copy to beside its work."""

import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor


class HostBuffer:
    """Bytes in host memory, locked for copies from a device where there is one."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        """Of at least the size that was reserved."""
        self._device: torch.device | None = None
        self._unlock: Callable[[], object] = lambda: None

    def reserve(self, size_bytes: int, device: torch.device | None) -> None:
        """Grow to `size_bytes`; locked where `device` is given. What was there is lost.

        Where the system refuses to lock the memory, copies are right all the same, but run one after another.
        """
        if self.bytes.nbytes >= size_bytes and device in (None, self._device):
            return
        # The smaller one goes first: the two would not fit, perhaps.
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
    """Lock what is there: torch's own pinned memory comes in powers of two, up to twice what is needed."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):
        # CUDA keeps the error for whoever launches next, and forgets it when told.
        torch.ones(1, device=device)
    return False


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
