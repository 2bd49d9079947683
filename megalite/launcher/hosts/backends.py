"""The job that a backend starts, the commands that it consists of, and how they are shown for a shell."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megalite.errors import LaunchError
from megalite.launcher.hosts.job_hosts import Placed, Source


@dataclass(frozen=True)
class Job:
    """A job to start: its hosts and ranks, the command line of a rank, and what each host has to know.

    arguments: those behind `python -m megalite`. folder: the working folder, the same on all hosts. exported: the
    variables that travel. port: of the rendezvous on the first host. interface: the network interface, "" for any.
    address: of the first host, as all hosts reach it; "": its name.
    extra: the user's arguments for the backend. scratch: a folder of this machine for files that a backend reads.
    devices: CUDA_VISIBLE_DEVICES of this machine, "" if it is not set.
    """

    source: Source
    hosts: tuple[Placed, ...]
    arguments: tuple[str, ...]
    folder: Path
    python: str
    exported: Mapping[str, str]
    port: int
    scratch: Path
    interface: str = ""
    address: str = ""
    extra: tuple[str, ...] = ()
    devices: str = ""

    @property
    def local(self) -> bool:
        return self.source == "local"

    @cached_property
    def world_size(self) -> int:
        return sum(len(host.slots) for host in self.hosts)

    @property
    def master(self) -> str:
        """The address of rank 0's host, or the name by which the other hosts know it."""
        return "127.0.0.1" if self.local else self.address or self.hosts[0].name

    def visible(self, host: Placed) -> dict[str, str]:
        """Return the variable that gives a host's ranks the chosen GPUs; empty if its first ones were chosen."""
        if not host.chosen:
            return {}
        names = self.devices.split(",") if self.local and self.devices else []
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[slot] if names else str(slot) for slot in host.slots)}

    @property
    def rank_command(self) -> tuple[str, ...]:
        return (self.python, "-m", "megalite", *self.arguments)


@dataclass(frozen=True)
class Command:
    """A process that `megalite launch` starts on this machine; host: the one whose ranks it starts, "" for all.

    environ: variables that are set for it, besides those of this process.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    host: str = ""


@dataclass(frozen=True)
class Start:
    """Everything that a backend needs: files of this machine (path -> text), and commands."""

    commands: tuple[Command, ...]
    files: Mapping[Path, str] = field(default_factory=dict)


def shell_lines(start: Start) -> Iterator[str]:
    """Yield the commands as lines that can be pasted into a shell."""
    for path, text in start.files.items():
        yield f"mkdir -p {shlex.quote(str(path.parent))}"
        yield f"cat > {shlex.quote(str(path))} <<'END'"
        yield from text.splitlines()
        yield "END"
    for command in start.commands:
        if command.host:
            yield f"# {command.host}"
        setting = [f"{name}={shlex.quote(value)}" for name, value in command.environ.items()]
        yield " ".join([*setting, shlex.join(command.argv)])


def require_first_slots(job: Job, backend: str) -> None:
    """Raise LaunchError where certain slots of a host were chosen, and the backend takes only a number of them."""
    chosen = [host.name for host in job.hosts if host.chosen]
    if chosen:
        raise LaunchError(
            f"--backend {backend} cannot choose slots by their numbers, as asked for on {', '.join(chosen)}; use "
            "--slots N, or --backend ssh or deepspeed"
        )


def require_equal_hosts(job: Job, backend: str) -> None:
    """Raise LaunchError where hosts have different numbers of ranks, and the backend starts as many on each."""
    counts = {host.name: len(host.slots) for host in job.hosts}
    if len(set(counts.values())) > 1:
        slots_of = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise LaunchError(
            f"--backend {backend} starts the same number of ranks on each host, but the hosts have {slots_of}; use "
            f"--slots {min(counts.values())}, or --backend ssh or deepspeed"
        )


def slots_file(hosts: Sequence[Placed]) -> str:
    """Return a hostfile with exactly these ranks, as DeepSpeed and Open MPI read it."""
    return "".join(f"{host.name} slots={len(host.slots)}\n" for host in hosts)


def counted_file(hosts: Sequence[Placed]) -> str:
    """Return a hostfile with exactly these ranks, as MPICH reads it."""
    return "".join(f"{host.name}:{len(host.slots)}\n" for host in hosts)
