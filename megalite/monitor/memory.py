"""How much memory this process holds."""

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
    """Bytes held now and at the most; reserved_bytes: what a device's allocator took at the most to hand these out."""

    now_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None


def process_memory() -> MemoryUse:
    """The resident set of this process, from /proc where there is one."""
    if _STATUS.exists():
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
        return MemoryUse(now, peak)
    # Without /proc only the peak is known, in bytes on macOS and in KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return MemoryUse(peak, peak)


def device_memory(device: "torch.device") -> MemoryUse | None:
    """What torch's allocator handed out and reserved on an accelerator, at the most since the last call.

    None where the device's allocator counts nothing. The first call counts from the start of the process.
    """
    import torch

    try:
        found = torch.accelerator.memory.memory_stats(device)
    except RuntimeError:  # a backend whose allocator is none of torch's device allocators
        return None
    torch.accelerator.memory.reset_peak_memory_stats(device)
    names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak")
    return MemoryUse(*(found.get(name, 0) for name in names))
