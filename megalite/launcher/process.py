"""Process control: cores, memory, malloc settings, parent death and orphans. No-ops outside of Linux."""

import ctypes
import errno
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")

# From <malloc.h> and <sys/prctl.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_FLUSH_SECONDS = 0.5
_LARGEST_INT = 2**31 - 1
_MIB = 2**20


def keep_freed_memory() -> bool:
    """Make glibc keep freed buffers for reuse, like its MALLOC_..._ variables; False without mallopt (musl, macOS).

    Otherwise glibc returns the activations of each step to the kernel, and page faults bring them back. Forked
    processes inherit the setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Older glibc refuses a threshold above 32 MiB.
    kept = mallopt(_M_MMAP_THRESHOLD, 1024 * _MIB) or mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT) and mallopt(_M_TOP_PAD, 64 * _MIB))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, the process that forked it, ends.

    To be called right after the fork; also covers a parent that ended before the call. Forks do not inherit it.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def within(seconds: float, action: Callable[[], T], otherwise: T) -> T:
    """Return the result of `action`, or `otherwise` if it raises or has none within `seconds`; it may go on then."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(action())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else otherwise


def end_process(code: int) -> NoReturn:
    """Exit without destructors, which could wait for a dead peer. Output that nobody takes is dropped."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
    for stream in (sys.stdout, sys.stderr):
        within(_FLUSH_SECONDS, stream.flush, None)
    os._exit(code)


def leave_closed_terminal() -> bool:
    """Drop what this process prints from now on where a write would fail, which would end a run that saves.

    That is a terminal that has closed, and a pipe: its reader, such as `tee` or the ssh of a launcher, ends as well or
    loses the same terminal. Files go on. To be called after SIGHUP, also in its handler; returns whether stdout is
    dropped.
    """
    dropped = False
    for descriptor in (2, 1):
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            continue
        look = select.poll()
        look.register(descriptor, 0)
        closed = any(event & (select.POLLHUP | select.POLLERR) for _, event in look.poll(0))
        dropped = closed or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        if dropped:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
    return dropped


@contextmanager
def unwritten_output_dropped(*, of_full_disk: bool) -> Iterator[None]:
    """Go on without what is printed in the `with` block where its terminal has closed.

    of_full_disk: also where the log cannot grow, which is no reason to end a run that makes steps.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EIO:  # SIGHUP may still come
            leave_closed_terminal()
        elif not of_full_disk or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


def adopt_orphans(adopt: bool) -> None:
    """Make this process the parent of orphaned descendants (a child subreaper), or stop that."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def children() -> set[int]:
    """Return the ids of this process's children, including zombies; an empty set without /proc."""
    own = str(os.getpid())
    processes = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return {process for process in processes if _status(process)[1:2] == [own]}


def descendants(process: int) -> list[int]:
    """Return the ids of all running descendants of a process, nearest first; empty without /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _status(int(entry.name))
        if fields and fields[0] != "Z":
            parents[int(entry.name)] = int(fields[1])
    below, running = [process], list[int]()
    while below:
        above = below.pop(0)
        direct = [child for child, parent in parents.items() if parent == above]
        running += direct
        below += direct
    return running


def forked_ranks(process: int) -> list[int]:
    """Return the ranks of a local job, in order: the descendants that its process forked, which keep its command line.

    Programs that a job starts, such as multiprocessing's resource tracker, have their own.
    """
    command = arguments_of(process)
    ranks = [child for child in descendants(process) if arguments_of(child) == command]
    return sorted(ranks, key=lambda rank: int((_status(rank)[19:20] or ["0"])[0]) * 2**32 + rank)


def kill_descendants(seconds: float = 5.0) -> None:
    """Kill and reap all descendants; this process must have adopted orphans (`adopt_orphans`).

    seconds: how long to wait for processes that the kernel cannot end at once.
    """
    deadline = time.monotonic() + seconds
    # The children of a killed child become children of this process, hence the loop.
    while (running := children()) and time.monotonic() < deadline:
        for child in running:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)


def session(process: int) -> int | None:
    """Return the id of the session of a process: of the process that began it, or of the terminal's shell; None without
    /proc."""
    fields = _status(process)[3:4]
    return int(fields[0]) if fields else None


def parent_of(process: int) -> int:
    """Return the id of a process's parent; 0 if it is unknown."""
    fields = _status(process)[1:2]
    return int(fields[0]) if fields else 0


def arguments_of(process: int) -> list[str]:
    """Return the command line of a process; empty if it is unknown."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def identity(process: int) -> str:
    """Return the id and the start time of a process: unique on this machine, while ids are reused."""
    started = _status(process)[19:20]
    return ".".join([str(process), *started])


def caught_signals() -> set[int]:
    """Return the signals that this process handles, in Python or in native code; an empty set without /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return set()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return {number for mask in masks for number in range(1, 65) if mask >> (number - 1) & 1}


def _status(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        # "pid (name) state ppid ...": the name may hold spaces and parentheses.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def available_cores() -> int:
    """Return the number of usable cores: the affinity mask, limited by the quotas of the control groups."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    for folder in _control_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), "cpu"):
        quota = _quota(folder)
        if quota is not None:
            cores = min(cores, quota)
    return max(1, int(cores))


_LIMITS = ("memory.max", "memory.limit_in_bytes")


def available_memory_bytes() -> int | None:
    """Return the free memory of this node, limited by the control groups; None if it is unknown."""
    available = _memory_sizes().get("MemAvailable")
    if available is None:
        return None
    for folder in _control_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), "memory"):
        left = _memory_left(folder)
        if left is not None:
            available = min(available, left)
    return available


def total_memory_bytes() -> int | None:
    """Return the memory and swap of this node, limited by the control groups; None if it is unknown."""
    sizes = _memory_sizes()
    if "MemTotal" not in sizes:
        return None
    swap, total = sizes.get("SwapTotal", 0), sizes["MemTotal"]
    for folder in _control_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), "memory"):
        limit = next((folder / name for name in _LIMITS if (folder / name).exists()), None)
        if limit is not None and (text := limit.read_text().strip()).isdecimal():
            total = min(total, int(text))
    return total + swap


def _memory_sizes() -> dict[str, int]:
    """Return the sizes in /proc/meminfo by their names, in bytes; empty without /proc."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine has a GPU, without asking its driver, which no fork would survive.

    WSL2 shows its cards, however many, as one dxg.
    """
    kfd = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    files = [*devices.glob("nvidia[0-9]*"), *devices.glob("dxg")]
    return bool(files) or any(node.read_text().strip() != "0" for node in kfd)


def _memory_left(folder: Path) -> int | None:
    """Return the free bytes of a control group (v2 or v1), counting its page cache as free; None without a limit."""
    names = ("memory.max", "memory.current", "inactive_file")
    if not (folder / names[0]).exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        limit, used = ((folder / name).read_text().strip() for name in names[:2])
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - int(used) + int(cached.get(names[2], 0))


def _control_groups(membership: Path, root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's control groups for "cpu" or "memory", from its own group up to the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / controllers if controllers else root
        # In a container the path is often the host's and not mounted here; the limits of the mount still apply.
        own = mount / group.strip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(mount))]
    return folders


def _quota(folder: Path) -> float | None:
    """Return the cores of a control group, v2 (cpu.max) or v1 (cpu.cfs_*); None without a limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _prctl(option: int, value: int) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger; False where the system does not tell."""
    return _status(pid)[:1] in (["T"], ["t"])
