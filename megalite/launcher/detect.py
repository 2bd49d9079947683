"""Detects the launcher of this process: reads rank, world size and master address from the environment.

Supports torchrun, deepspeed, Open MPI, MPICH, SLURM, and variables set by hand.
"""

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from megalite.errors import LaunchError

LOOPBACK = "127.0.0.1"
# torch's default port, for MPI on one node. SLURM jobs share nodes, so their port depends on the job id.
DEFAULT_PORT = 29500
_SLURM_PORTS = range(20000, 30000)  # below the ephemeral ports of Linux


@dataclass(frozen=True)
class RankInfo:
    """The rank of a process, its launcher and its rendezvous; launcher: "megalite" for ranks that we start."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str
    node: str
    rendezvous: str = "env://"
    """torch's init_method: env:// (master address and port), or a file for ranks that we start."""
    job: str = ""
    """A string that identifies this start of the job; empty if only the id of the parent process identifies it."""

    @property
    def on_one_node(self) -> bool:
        return self.local_world_size == self.world_size


@dataclass(frozen=True)
class _Names:
    """The names of a launcher's environment variables."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_DEEPSPEED = _Names("deepspeed", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_EXPLICIT = _Names("the environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPENMPI = _Names(
    "openmpi",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH = _Names("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = _Names("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def rank_info(environ: Mapping[str, str] | None = None) -> RankInfo | None:
    """Return the rank that a launcher gave this process, or None without a launcher.

    A SLURM step with a single task counts as no launcher: it is a shell to start local ranks in. torchrun and deepspeed
    are looked for first, because MPI or SLURM may have started them, then MPI, because mpirun starts its daemons with
    srun. Raises LaunchError with the variable's name if variables are missing or contradict each other, and in the
    shell of a SLURM batch job with several tasks.
    """
    environ = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" in environ:
        return _from_launcher(environ, _TORCHRUN)
    if "CROSS_RANK" in environ and "LOCAL_SIZE" in environ:
        return _from_launcher(environ, _DEEPSPEED)
    if any(name in environ for name in (_EXPLICIT.rank, _EXPLICIT.world_size, _EXPLICIT.local_rank)):
        return _from_explicit(environ)
    if _OPENMPI.rank in environ:
        return _from_mpi(environ, _OPENMPI)
    if _MPICH.rank in environ and _MPICH.local_rank in environ:
        return _from_mpi(environ, _MPICH)
    if "SLURM_STEP_ID" in environ and _SLURM.rank in environ:
        return _from_slurm(environ)
    if _MPICH.rank in environ:
        return _from_mpi(environ, _MPICH)
    _refuse_batch_shell(environ)
    return None


def local_rank_infos(world_size: int, rendezvous: Path) -> tuple[RankInfo, ...]:
    """Return the ranks of a job on this machine only; `rendezvous` is a file that does not exist yet.

    A file, because torch's TCP store listens on all network interfaces. Only DeepSpeed reads the master address and
    port, and nothing listens there.
    """
    return tuple(
        RankInfo(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_addr=LOOPBACK,
            master_port=DEFAULT_PORT,
            launcher="megalite",
            node=socket.gethostname(),
            rendezvous=f"file://{rendezvous}",
        )
        for rank in range(world_size)
    )


def _from_launcher(environ: Mapping[str, str], names: _Names) -> RankInfo:
    """Read the variables of torchrun or deepspeed, which set all of them."""
    return _checked(
        names,
        environ,
        local_world_size=_integer(environ, names.local_world_size, names),
        master_addr=_text(environ, "MASTER_ADDR", names),
        master_port=_integer(environ, "MASTER_PORT", names),
    )


def _from_explicit(environ: Mapping[str, str]) -> RankInfo:
    """Read RANK and its companions, set by hand or by an unknown launcher: all of them or LaunchError."""
    names = _EXPLICIT
    if names.local_world_size not in environ and "LOCAL_SIZE" in environ:
        names = _Names(names.launcher, names.rank, names.world_size, names.local_rank, "LOCAL_SIZE")
    info = _from_launcher(environ, names)
    for other in (_OPENMPI, _MPICH, _SLURM):
        # Another world size means nested launchers; another rank in the same world means a stale variable.
        same_world = environ.get(other.world_size) == str(info.world_size)
        if same_world and other.rank in environ and environ[other.rank] != str(info.rank):
            raise LaunchError(
                f"RANK is {info.rank} but {other.rank} is {environ[other.rank]}, in a world of "
                f"{info.world_size}; unset RANK, WORLD_SIZE and LOCAL_RANK to use the rank of {other.launcher}"
            )
    return info


def _from_mpi(environ: Mapping[str, str], names: _Names) -> RankInfo:
    """Read the variables of mpirun, which sets the rank, but not the master address and port."""
    world_size = _integer(environ, names.world_size, names)
    local_world_size = _integer(environ, names.local_world_size, names)
    if "MASTER_ADDR" not in environ and local_world_size != world_size:
        raise LaunchError(
            f"MASTER_ADDR is not set, and mpirun ({names.launcher}) started only {local_world_size} of "
            f"{world_size} ranks on this node; it can be left out on a single node only: export the address "
            "of rank 0's node to every rank (Open MPI: -x MASTER_ADDR, MPICH: -genv MASTER_ADDR ...)"
        )
    return _checked(
        names,
        environ,
        local_world_size=local_world_size,
        master_addr=environ.get("MASTER_ADDR", LOOPBACK),
        master_port=_port_of_job(environ, names),
    )


def _from_slurm(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of srun; None for a step with a single task."""
    world_size = _integer(environ, _SLURM.world_size, _SLURM)
    if world_size == 1:
        return None
    node_rank = _integer(environ, "SLURM_NODEID", _SLURM)
    tasks = tasks_per_node(_text(environ, _SLURM.local_world_size, _SLURM))
    if node_rank >= len(tasks) or sum(tasks) != world_size:
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE = {environ[_SLURM.local_world_size]!r} does not fit SLURM_NODEID = "
            f"{node_rank} and {_SLURM.world_size} = {world_size}"
        )
    nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    job = [environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    first = LOOPBACK if len(tasks) == 1 else node_names(_text(environ, nodes, _SLURM), nodes)[0]
    info = _checked(
        _SLURM,
        environ,
        local_world_size=tasks[node_rank],
        master_addr=environ.get("MASTER_ADDR", first),
        master_port=_port_of_job(environ, _SLURM),
    )
    return replace(info, job=".".join(job))


def _refuse_batch_shell(environ: Mapping[str, str]) -> None:
    """Raise LaunchError in the shell of a batch job with several tasks: it looks like rank 0, but is no task."""
    tasks = environ.get("SLURM_NTASKS", "1")
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ and (tasks, nodes) != ("1", "1"):
        raise LaunchError(
            f"this is the batch shell of a SLURM job with SLURM_NTASKS = {tasks} on SLURM_JOB_NUM_NODES = {nodes}, "
            "not one of its tasks; start the ranks with srun, as launch/slurm.sbatch does"
        )


def _checked(
    names: _Names, environ: Mapping[str, str], *, local_world_size: int, master_addr: str, master_port: int
) -> RankInfo:
    info = RankInfo(
        rank=_integer(environ, names.rank, names),
        world_size=_integer(environ, names.world_size, names),
        local_rank=_integer(environ, names.local_rank, names),
        local_world_size=local_world_size,
        master_addr=master_addr,
        master_port=master_port,
        launcher=names.launcher,
        node=environ.get("SLURMD_NODENAME") or socket.gethostname(),
    )
    bounds = (
        (names.rank, info.rank, 0, info.world_size - 1, names.world_size, info.world_size),
        (
            names.local_rank,
            info.local_rank,
            0,
            local_world_size - 1,
            names.local_world_size,
            local_world_size,
        ),
        (names.local_world_size, local_world_size, 1, info.world_size, names.world_size, info.world_size),
    )
    for name, value, least, most, other, size in bounds:
        if not least <= value <= most:
            raise LaunchError(f"{name} = {value} does not fit {other} = {size}, as set by {names.launcher}")
    if not 1 <= master_port <= 65535:
        raise LaunchError(f"MASTER_PORT = {master_port} is not a port; use a number from 1 to 65535")
    return info


def _text(environ: Mapping[str, str], name: str, names: _Names) -> str:
    value = environ.get(name, "").strip()
    if value:
        return value
    given = [known for known in (names.rank, names.world_size, names.local_rank) if environ.get(known)]
    others = f", but {', '.join(given)} {'is' if len(given) == 1 else 'are'}" if given else ""
    raise LaunchError(
        f"{name} is not set{others}, and {names.launcher} sets all of them; set it, or unset the others to have "
        "megalite start local ranks"
    )


def _integer(environ: Mapping[str, str], name: str, names: _Names) -> int:
    value = _text(environ, name, names)
    if not re.fullmatch(r"[0-9]+", value):
        raise LaunchError(f"{name} = {value!r} is not a whole number, as {names.launcher} would set it")
    return int(value)


def _port_of_job(environ: Mapping[str, str], names: _Names) -> int:
    """Return MASTER_PORT, or a port computed from the SLURM job id, or torch's default port."""
    if "MASTER_PORT" in environ:
        return _integer(environ, "MASTER_PORT", names)
    if "SLURM_JOB_ID" not in environ:
        return DEFAULT_PORT
    job = _integer(environ, "SLURM_JOB_ID", names)
    # mpirun's daemons run in another step, whose id may differ between nodes.
    step = _integer(environ, "SLURM_STEP_ID", names) if names is _SLURM else 0
    return _SLURM_PORTS[(job + step) % len(_SLURM_PORTS)]


def tasks_per_node(compact: str) -> tuple[int, ...]:
    """Expand SLURM's "2(x3),1" to (2, 2, 2, 1)."""
    counts: list[int] = []
    for item in compact.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", item.strip())
        if match is None:
            raise LaunchError(f"{_SLURM.local_world_size} = {compact!r} is not a list like '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def node_names(compact: str, variable: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """Expand SLURM's "gpu[08-10,12],login" to its node names in order: gpu08, gpu09, gpu10, gpu12, login."""
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[0-9,-]+\]|,(?=[^,]))+", compact):
        raise LaunchError(f"{variable} = {compact!r} is not a SLURM node list like 'gpu[08-10,12],login'")
    names: list[str] = []
    for item in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", compact):
        pieces = re.split(r"\[([^\]]*)\]", item)
        choices = [_numbers(piece, variable) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        names += ["".join(choice) for choice in product(*choices)]
    return tuple(names)


def _numbers(ranges: str, variable: str) -> Sequence[str]:
    """Expand "08-10,12" to 08, 09, 10, 12; leading zeros are part of the name."""
    numbers: list[str] = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
            raise LaunchError(f"{variable} holds {item!r}, which is not a range like '08-10'")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def without_local_rank(arguments: Iterable[str]) -> list[str]:
    """Drop the --local_rank that deepspeed adds without --no_local_rank; LOCAL_RANK has the same value."""
    return [argument for argument in arguments if not re.fullmatch(r"--local[-_]rank=\d+", argument)]
