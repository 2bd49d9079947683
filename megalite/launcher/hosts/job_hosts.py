"""Finds the hosts of a job: from a hostfile, from a SLURM allocation, or this machine; and gives each its ranks."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megalite.errors import LaunchError, Problem, problem_list
from megalite.launcher.hosts.hostfile import Host, read_hostfile
from megalite.launcher.rank.slurm import node_names, tasks_per_node

Source = Literal["hostfile", "slurm", "local"]
_GPU_FILE = re.compile(r"nvidia[0-9]+")


@dataclass(frozen=True)
class HostOptions:
    """The options of `megalite launch` that choose hosts; "" and None: not given.

    include, exclude: DeepSpeed's syntax, NAME[:SLOT,SLOT][@NAME...]. hosts, slots: at most so many hosts, and slots on
    each. local: this machine, even in a SLURM allocation.
    """

    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    hosts: int | None = None
    slots: int | None = None
    local: bool = False


@dataclass(frozen=True)
class Hosts:
    """The hosts that a job may use, and where they were found."""

    source: Source
    named: str
    """The source as a user knows it: "the hostfile my/hosts"."""
    hosts: tuple[Host, ...]
    counted: bool = True
    """False on a machine without GPUs: it has as many slots as the run has ranks."""
    limits: tuple[str, ...] = ()
    """The options that took hosts or slots away, as they were typed."""
    whole: int | None = None
    """The number of slots before `limits`; None if they are not counted."""

    @property
    def slots(self) -> int | None:
        """The number of slots of all hosts; None if they are not counted."""
        return sum(len(host.slots) for host in self.hosts) if self.counted else None


@dataclass(frozen=True)
class Placed:
    """A host of a job: its slots, one for each of its ranks, and its first rank."""

    name: str
    slots: tuple[int, ...]
    first_rank: int
    chosen: bool
    """Whether the slots are other ones than the first of the host, so that its GPUs must be named."""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + len(self.slots))


def find_hosts(options: HostOptions, environ: Mapping[str, str], devices: Path = Path("/dev")) -> Hosts:
    """Return the hosts that a job may use: those of --hostfile, of the SLURM allocation, or this machine.

    devices: the folder in which the GPUs of this machine are counted.
    Raises LaunchError for a wrong hostfile, an unknown host or slot, and where no slot is left.
    """
    if options.hostfile is not None:
        available = Hosts("hostfile", f"the hostfile {options.hostfile}", read_hostfile(options.hostfile))
    elif "SLURM_JOB_ID" in environ and "SLURM_JOB_NODELIST" in environ and not options.local:
        available = _of_slurm(environ)
    else:
        available = _local(environ, devices)
    left = _limited(_filtered(available, options), options)
    return replace(left, whole=available.slots) if left.limits else left


def place_ranks(available: Hosts, world_size: int) -> tuple[tuple[Placed, ...], tuple[str, ...]]:
    """Return the hosts with their ranks, consecutive and the first hosts first, and what of the hosts stays idle.

    Raises LaunchError where the job has more ranks than the hosts have slots.
    """
    hosts = available.hosts
    if available.slots is None:
        hosts = (replace(hosts[0], slots=tuple(range(world_size))),)
    elif world_size > available.slots:
        raise LaunchError(_too_many(available, world_size))
    placed: list[Placed] = []
    idle: list[str] = []
    first = 0
    for host in hosts:
        used = host.slots[: world_size - first]
        if used:
            placed.append(Placed(host.name, used, first, used != tuple(range(len(used)))))
        if not used:
            idle.append(host.name)
        elif len(used) < len(host.slots):
            left = len(host.slots) - len(used)
            idle.append(f"{left} of {len(host.slots)} slots of {host.name}")
        first += len(used)
    return tuple(placed), tuple(idle)


def _too_many(available: Hosts, world_size: int) -> str:
    slots = ", ".join(f"{host.name} {len(host.slots)}" for host in available.hosts)
    remedy = {
        "hostfile": "add hosts or slots to it",
        "slurm": "allocate more tasks (sbatch --nodes, --ntasks-per-node)",
        "local": "set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU",
    }[available.source]
    limits = f" with {' '.join(available.limits)}" if available.limits else ""
    if available.limits and (available.whole is None or available.whole >= world_size):
        remedy = f"leave out {' and '.join(available.limits)}"
    return (
        f"the run has {world_size} ranks (parallel.tensor * context * pipeline * data), but {available.named} has "
        f"{available.slots} slot{'s' * (available.slots != 1)} ({slots}){limits}, and a slot runs one rank; "
        f"use a smaller layout, or {remedy}"
    )


def _of_slurm(environ: Mapping[str, str]) -> Hosts:
    """Read the allocation: one slot for each task, or for each GPU where the tasks were left to SLURM."""
    names = node_names(environ["SLURM_JOB_NODELIST"])
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    tasks = environ.get("SLURM_TASKS_PER_NODE", "")
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    if re.fullmatch("[1-9][0-9]*", gpus) and not asked:
        counts: Sequence[int] = [int(gpus)] * len(names)
    else:
        counts = tasks_per_node(tasks) if tasks else [1] * len(names)
    if len(counts) != len(names):
        raise LaunchError(
            f"SLURM_TASKS_PER_NODE = {tasks!r} has {len(counts)} nodes, but SLURM_JOB_NODELIST = "
            f"{environ['SLURM_JOB_NODELIST']!r} has {len(names)}; unset both to use this machine only"
        )
    hosts = tuple(Host(name, tuple(range(count))) for name, count in zip(names, counts, strict=True))
    return Hosts("slurm", f"the SLURM job {environ['SLURM_JOB_ID']}", hosts)


def _local(environ: Mapping[str, str], devices: Path) -> Hosts:
    gpus = local_gpus(environ, devices)
    return Hosts("local", "this machine", (Host("localhost", tuple(range(gpus))),), counted=gpus > 0)


def local_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs that a process here may use: CUDA_VISIBLE_DEVICES, or all device files; 0 for none."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(bool(_GPU_FILE.fullmatch(entry.name)) for entry in devices.glob("nvidia*"))
    if chosen is None:
        return present
    # CUDA itself stops at the first entry that it does not know.
    names = [name.strip() for name in chosen.split(",")]
    valid = [re.fullmatch(r"[0-9]+|(GPU|MIG)-[\w./-]+", name) is not None for name in names]
    return [*valid, False].index(False)


def _filtered(available: Hosts, options: HostOptions) -> Hosts:
    """Apply --include and --exclude. Raises LaunchError with all their problems."""
    if not options.include and not options.exclude:
        return available
    if options.include and options.exclude:
        raise LaunchError(
            "--include and --exclude cannot be combined; give --include with all that is to be used"
        )
    option, text = ("--include", options.include) if options.include else ("--exclude", options.exclude)
    if not available.counted:
        raise LaunchError(
            f"{option} {text}: this machine has no GPU, and so no numbered slots; leave it out, or give --hostfile"
        )
    named, problems = _parsed(text, available)
    if problems:
        raise LaunchError(problem_list(problems, f"{option} {text}"))
    hosts = []
    for host in available.hosts:
        slots = named.get(host.name)
        if option == "--include":
            kept = () if slots is None else tuple(slot for slot in host.slots if slot in slots)
        else:
            kept = tuple(slot for slot in host.slots if slot not in (slots or ()))
        if kept:
            hosts.append(Host(host.name, kept))
    if not hosts:
        raise LaunchError(f"{option} {text} leaves no slot of {available.named}; name fewer hosts or slots")
    return replace(available, hosts=tuple(hosts), limits=(*available.limits, f"{option} {text}"))


def _parsed(text: str, available: Hosts) -> tuple[dict[str, set[int]], list[Problem]]:
    """Return host -> its named slots (all of them without numbers), and the problems of the text."""
    known = {host.name: host.slots for host in available.hosts}
    named: dict[str, set[int]] = {}
    problems = []
    for item in text.split("@"):
        name, colon, numbers = item.partition(":")
        if not name:
            problems.append(Problem(repr(item), "names no host", "write NAME or NAME:0,1, joined by @"))
        elif name not in known:
            problems.append(
                Problem(name, f"is not a host of {available.named}", f"it has {', '.join(known)}")
            )
        elif name in named:
            problems.append(Problem(name, "is named twice", "write its slots once, as in NAME:0,1"))
        elif not colon:
            named[name] = set(known[name])
        elif not re.fullmatch(r"[0-9]+(,[0-9]+)*", numbers):
            problems.append(Problem(item, f"{numbers!r} is no list of slots", f"write {name}:0,1 or {name}"))
        else:
            slots = [int(number) for number in numbers.split(",")]
            named[name] = set(slots)
            for wrong in sorted({slot for slot in slots if slot not in known[name]}):
                slots_text = ", ".join(map(str, known[name]))
                problems.append(Problem(item, f"{name} has no slot {wrong}", f"it has {slots_text}"))
            for twice in sorted({slot for slot in slots if slots.count(slot) > 1}):
                problems.append(Problem(item, f"names slot {twice} twice", "name it once"))
    return named, problems


def _limited(available: Hosts, options: HostOptions) -> Hosts:
    """Apply --hosts and --slots. Raises LaunchError where there are not so many."""
    hosts, limits = available.hosts, available.limits
    if options.hosts is not None:
        if options.hosts > len(hosts):
            already = f" with {' '.join(limits)}" if limits else ""
            raise LaunchError(
                f"--hosts {options.hosts}: {available.named} has {len(hosts)}{already}; use {len(hosts)} or fewer"
            )
        hosts, limits = hosts[: options.hosts], (*limits, f"--hosts {options.hosts}")
    if options.slots is None:
        return replace(available, hosts=hosts, limits=limits)
    if not available.counted:
        only = Host(hosts[0].name, tuple(range(options.slots)))
        return replace(available, hosts=(only,), counted=True, limits=(*limits, f"--slots {options.slots}"))
    small = [f"{host.name} has {len(host.slots)}" for host in hosts if len(host.slots) < options.slots]
    if small:
        least = min(len(host.slots) for host in hosts)
        raise LaunchError(f"--slots {options.slots}: {', '.join(small)}; use {least} or fewer")
    fewer = tuple(Host(host.name, host.slots[: options.slots]) for host in hosts)
    if fewer != hosts:
        limits = (*limits, f"--slots {options.slots}")
    return replace(available, hosts=fewer, limits=limits)
