"""torch.profiler over one step of a rank: a trace for Perfetto, tables of the dearest operators, and its memory."""

import errno
import gzip
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megalite.config.output.summary import memory_text

if TYPE_CHECKING:
    import torch

PROFILED_FILES = "rank-{:05}"
"""The beginning of the names of a rank's files."""
TRACE, OPERATORS, MEMORY, SNAPSHOT = ".trace.json.gz", ".operators.txt", ".memory.txt", ".memory.pickle"
"""The ends of their names; a card has a snapshot of its allocator in place of the table of memory."""
HOW_TO_READ = (
    "*.operators.txt is a table of the operators, https://ui.perfetto.dev opens *.trace.json.gz, *.memory.txt is a "
    "table or *.memory.pickle a snapshot for https://pytorch.org/memory_viz"
)
_ROWS = 25
# Allocations that a snapshot keeps; torchtitan's number too. A step of a large model makes fewer.
_SNAPSHOT_ENTRIES = 100_000


class StepProfile:
    """Profiles what runs inside of the `with` block, and writes the files at its end.

    Nothing that fails here ends the run: `failure` tells what did. An exception of the block itself passes, and
    nothing is written then.
    """

    def __init__(self, device: "torch.device", folder: Path, rank: int):
        """folder: of the step; it is made if need be."""
        self.failure = ""
        self._device, self._folder, self._name = device, folder, PROFILED_FILES.format(rank)
        self._profile: Any = None
        # torch.cuda.memory, or torch.xpu.memory, where the allocator keeps a history.
        self._history: Any = None
        self._traces_device = False

    def __enter__(self) -> "StepProfile":
        try:
            self._start()
        except Exception as error:
            self.failure = f"torch.profiler did not start: {error}"
            self._profile = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._profile is not None:
                self._profile.stop()
                if error is None:
                    self._write()
        except Exception as failed:
            reason = failed.strerror if isinstance(failed, OSError) else None
            self.failure = f"{self._folder} is not complete: {reason or failed}"
        finally:
            if self._history is not None:
                self._history._record_memory_history(enabled=None)

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device.type != "cpu":
            activities += sorted(torch.profiler.supported_activities() - {ProfilerActivity.CPU}, key=str)
            # The first use of the card's tracer takes seconds, which are not the step's.
            with profile(activities=activities):
                torch.ones(1, device=self._device).add_(1)
            memory = getattr(torch.get_device_module(self._device), "memory", None)
            self._history = memory if hasattr(memory, "_record_memory_history") else None
        self._traces_device = len(activities) > 1
        if self._history is not None:
            self._history._record_memory_history(max_entries=_SNAPSHOT_ENTRIES, stacks="python")
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        operators = _operators(self._profile)
        if self._traces_device and not any(each.self_device_time_total for each in operators):
            self.failure = (
                "no work of the device was recorded: the messages of its tracer (CUPTI) above say why"
            )
        time = "self_device_time_total" if self._traces_device else "self_cpu_time_total"
        self._path(OPERATORS).write_text("\n".join(_time_lines(operators, time)) + "\n")
        if self._history is not None:
            self._history._dump_snapshot(str(self._path(SNAPSHOT)))
        else:
            place = "cpu" if self._device.type == "cpu" else "device"
            lines = _memory_lines(operators, f"self_{place}_memory_usage")
            self._path(MEMORY).write_text("\n".join(lines) + "\n")
        self._write_trace()

    def _write_trace(self) -> None:
        """Write the trace packed, as Perfetto reads it: it is a tenth of the size."""
        plain, packed = self._path(".trace.json"), self._path(TRACE)
        try:
            self._profile.export_chrome_trace(str(plain))
            with plain.open("rb") as whole, gzip.open(packed, "wb", compresslevel=1) as file:
                shutil.copyfileobj(whole, file)
        except OSError as error:
            packed.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError):
                # On a full disk Kineto raises nothing, and leaves an unfinished file of another name.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(plain)) from None
            raise
        finally:
            for unpacked in (plain, plain.with_name(f"{plain.name}.tmp")):
                unpacked.unlink(missing_ok=True)

    def _path(self, end: str) -> Path:
        return self._folder / f"{self._name}{end}"


def _operators(profile: Any) -> list[Any]:
    """Return torch's averages by operator, without the kernels, whose time the operators that launch them have."""
    from torch.autograd import DeviceType

    averages = profile.key_averages()
    return [each for each in averages if each.device_type == DeviceType.CPU and not each.is_user_annotation]


def _time_lines(operators: list[Any], time: str) -> Iterator[str]:
    """Yield a table of the operators whose own time is longest. time: the attribute for it, in microseconds."""
    whole = sum(getattr(operator, time) for operator in operators) or 1
    where = "on the device" if "device" in time else "on the host"
    yield f"operators by their own time {where}, without that of the ones they call: {whole / 1000:,.1f} ms in all"
    yield f"{'calls':>8}{'own ms':>12}{'share':>8}  operator"
    for operator in sorted(operators, key=lambda each: -getattr(each, time))[:_ROWS]:
        own = getattr(operator, time)
        yield f"{operator.count:>8,}{own / 1000:>12,.2f}{own / whole:>8.1%}  {operator.key}"


def _memory_lines(operators: list[Any], size: str) -> Iterator[str]:
    """Yield a table of the operators that allocate the most. size: the attribute for it, in bytes."""
    yield "operators by the memory that they allocate and leave to others, all calls together"
    yield f"{'calls':>8}{'allocated':>12}  operator"
    largest = sorted(operators, key=lambda each: -getattr(each, size))[:_ROWS]
    for operator in largest:
        if (allocated := getattr(operator, size)) >= 1024:
            yield f"{operator.count:>8,}{memory_text(allocated):>12}  {operator.key}"
