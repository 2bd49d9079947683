"""The memory use of this process, and of its device."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryUse:
    """Current and peak bytes in use; reserved_bytes: the peak that a device's allocator has reserved for them."""

    now_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None


def process_memory() -> MemoryUse:
    """Return the resident set size of this process, from /proc if it exists."""
    if _STATUS.exists():
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
        return MemoryUse(now, peak)
    # Without /proc only the peak is known, in bytes on macOS and in KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return MemoryUse(peak, peak)


def device_memory(device: "torch.device") -> MemoryUse | None:
    """Return the allocated and reserved bytes of torch's allocator on a device; peaks since the last call.

    None if the allocator has no statistics. The first call covers the time since the start of the process.
    """
    import torch

    try:
        statistics = torch.accelerator.memory.memory_stats(device)
    except RuntimeError:  # the backend does not use a torch device allocator
        return None
    torch.accelerator.memory.reset_peak_memory_stats(device)
    names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak")
    return MemoryUse(*(statistics.get(name, 0) for name in names))
