"""How much memory this process holds."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes held now and at the most."""

    now_bytes: int
    peak_bytes: int


def process_memory() -> MemoryUse:
    """The resident set of this process, from /proc where there is one."""
    if _STATUS.exists():
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
        return MemoryUse(now, peak)
    # Without /proc only the peak is known, in bytes on macOS and in KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return MemoryUse(peak, peak)


def device_memory() -> MemoryUse:
    """What torch's allocator has handed out on the current CUDA device."""
    import torch

    return MemoryUse(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
