"""What this process asks of the system: cores, the allocator, its parent's end, orphans. No-ops off Linux."""

import ctypes
import os
import signal
from pathlib import Path

# From <malloc.h> and <sys/prctl.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_LARGEST_INT = 2**31 - 1
_MIB = 2**20


def keep_freed_memory() -> bool:
    """Have glibc keep freed buffers for reuse, as its MALLOC_..._ variables would from the start.

    Without it every activation of a step is handed back to the kernel and faulted in again. Forked processes
    inherit it. False where the C library has no mallopt (musl, macOS): then nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Older glibc refuses a threshold above 32 MiB.
    kept = mallopt(_M_MMAP_THRESHOLD, 1024 * _MIB) or mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT) and mallopt(_M_TOP_PAD, 64 * _MIB))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as `parent`, the process that forked it, is gone.

    Call it first thing after the fork: a parent that died before the call is noticed too. Not inherited by
    forks.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(adopt: bool) -> None:
    """Whether processes below this one that lose their parent become its own children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def children() -> set[int]:
    """The ids of this process's children, ended ones that nobody waited for included; empty without /proc."""
    own = str(os.getpid())
    processes = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return {process for process in processes if _status(process)[1:2] == [own]}


def identity(process: int) -> str:
    """A name for a running process that no later one on this machine shares, as ids alone may."""
    started = _status(process)[19:20]
    return ".".join([str(process), *started])


def _status(process: int) -> list[str]:
    """State, parent's id and what follows in proc(5)'s `stat`; empty if there is no such process."""
    try:
        # "pid (name) state ppid ...": the name may hold spaces and parentheses.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def available_cores() -> int:
    """The cores this process may use at once: its affinity mask, capped by its control groups' quotas."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    for folder in _control_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), "cpu"):
        quota = _quota(folder)
        if quota is not None:
            cores = min(cores, quota)
    return max(1, int(cores))


def available_memory_bytes() -> int | None:
    """What this node can still hand out, or this process's control groups; None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    for folder in _control_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), "memory"):
        left = _memory_left(folder)
        if left is not None:
            available = min(available, left)
    return available


def _memory_left(folder: Path) -> int | None:
    """Bytes that a control group of version 2 or 1 has left, its page cache counted as such; None without a limit."""
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
    """The folders, own group first and then its ancestors, whose limits on "cpu" or "memory" hold for this process."""
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
        # In a container the path is often that of the host, which is not mounted here: the mount itself
        # still counts.
        own = mount / group.strip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(mount))]
    return folders


def _quota(folder: Path) -> float | None:
    """Cores granted by a control group of version 2 (cpu.max) or 1 (cpu.cfs_*), or None without a limit."""
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
