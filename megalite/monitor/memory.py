"""The memory use of this process, and of its device; and the message when a device has no memory left."""

import re
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.config.output.summary import memory_text
from megalite.errors import MemoryExhausted
from megalite.launcher.rank.environment import ALLOCATOR_VARIABLES, SEGMENTS_STAY, variables

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")
# The last one is torch's of the host.
_WITHOUT_MEMORY = ("out of memory", "cublas_status_alloc_failed", "can't allocate memory")


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


def free_bytes(device: "torch.device") -> int | None:
    """Return the free bytes of an accelerator; None for the CPU."""
    import torch

    return None if device.type == "cpu" else int(torch.get_device_module(device).mem_get_info(device)[0])


def empty_cache(device: "torch.device") -> None:
    """Give the unused memory of an accelerator's allocator back to the device. Waits for the device."""
    import torch

    if device.type != "cpu":
        torch.accelerator.memory.empty_cache()


@dataclass(frozen=True)
class ExhaustedCard:
    """A device that has no memory left, in bytes.

    asked: the allocation that failed, in torch's words; "" if torch does not say. free: of `total`, at the moment.
    used: the most that torch has used. reserved: the most that it has taken from the device for that.
    full: whether the device has no room; False: page-locked host memory, or another allocation, failed.
    """

    name: str
    total: int
    free: int
    used: int
    reserved: int
    asked: str
    full: bool = True

    @classmethod
    def of(cls, device: "torch.device", error: BaseException) -> "ExhaustedCard":
        """Return the state of a device after `error`. Resets the peaks of its allocator, as `device_memory`."""
        import torch

        module = torch.get_device_module(device)
        free, total = module.mem_get_info(device)
        memory = device_memory(device) or MemoryUse(0, 0)
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        name = f"{module.get_device_name(device)} ({device})"
        # Page-locked memory of the host fails with the same words, and so does a killed worker.
        full = isinstance(error, torch.OutOfMemoryError) or free <= total / 10
        return cls(
            name, total, free, memory.peak_bytes, memory.reserved_bytes or 0, asked[1] if asked else "", full
        )

    def free_lines(self, error: BaseException) -> Iterator[str]:
        """Yield the state of a device that is not full, after `error`."""
        yield f"out of memory, but much of {self.name} is free: {error}"
        yield (
            f"{memory_text(self.free)} of the card's {memory_text(self.total)} are free now: page-locked host memory "
            "or another allocation failed; see the host's free memory, and the limit of locked memory (ulimit -l)"
        )

    @property
    def full_lines(self) -> Iterator[str]:
        """The state of a full device, and advice if much of the reserved memory is unused."""
        yield f"out of memory on {self.name}" + (f": {self.asked} more do not fit" if self.asked else "")
        used, reserved = memory_text(self.used), memory_text(self.reserved)
        yield (
            f"the card has {memory_text(self.total)}, of which {memory_text(self.free)} are free now; torch used up to "
            f"{used} and reserved {reserved}"
        )
        environ = variables()
        chosen = any("expandable_segments" in environ.get(name, "") for name in ALLOCATOR_VARIABLES)
        if self.reserved - self.used > self.total / 20 and not chosen and SEGMENTS_STAY not in environ:
            unused = memory_text(self.reserved - self.used)
            yield f"{unused} of that are unused pieces: set PYTORCH_ALLOC_CONF=expandable_segments:True"


@contextmanager
def exhausted_memory_explained(
    device: "torch.device", explain: Callable[[ExhaustedCard | None], Sequence[str]]
) -> Iterator[None]:
    """Turn an accelerator's out-of-memory error inside of the `with` block into MemoryExhausted.

    explain: returns the lines behind those on the device: what is kept there, and the settings that lower it. Its
    argument is None if the device does not say how much memory it has. Whatever fails here, the error stays that of
    the memory.
    """
    try:
        yield
    except Exception as error:
        if device.type == "cpu" or (cause := memory_error(error)) is None:
            raise
        try:
            card = ExhaustedCard.of(device, cause)
            lines = list(card.full_lines if card.full else card.free_lines(cause))
        except Exception:  # the driver may allocate for a question, too
            card, lines = None, [f"out of memory on {device}: {cause}"]
        try:
            lines += explain(card)
        except Exception as unexplained:
            lines.append(f"what is kept there is not known: {unexplained!r}")
        raise MemoryExhausted("\n  ".join(lines)) from error


def memory_error(error: BaseException | None) -> BaseException | None:
    """Return the exception in a chain that says that a device or the host has no memory left; None if there is none."""
    import torch

    while error is not None:
        # The driver, cuBLAS and NCCL allocate too, beside torch's allocator.
        text = str(error).lower()
        beside = any(words in text for words in _WITHOUT_MEMORY)
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or (
            isinstance(error, RuntimeError) and beside
        ):
            return error
        error = error.__cause__
    return None
