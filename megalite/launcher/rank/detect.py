"""Detects who started this process, by a table of the launchers' variables, and reads rank and master from them.

The rows stand in the order in which they win: a launcher that another one started stands before it.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from megalite.errors import LaunchError
from megalite.launcher.rank.slurm import (
    in_shell,
    node_names,
    port_of_job,
    refuse_shell,
    step_identity,
    tasks_per_node,
)

LOOPBACK = "127.0.0.1"
# torch's default port, for MPI on one node. SLURM jobs share nodes, so their port depends on the job id.
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class RankInfo:
    """The rank of a process, its launcher and its rendezvous; launcher: "megalite" for ranks that we start."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    """Empty for ranks of mpirun on several hosts without MASTER_ADDR: `launcher/rank/mpi.py` has them agree on it."""
    master_port: int
    launcher: str
    node: str
    rendezvous: str = "env://"
    """torch's init_method: env:// (master address and port), or a file for ranks that we start."""
    job: str = ""
    """The same string in all ranks of a job, by which its launcher tells it from others; empty if there is none."""
    node_rank: int | None = None
    """The place of this host among the job's hosts; None if the launcher does not say."""
    hosts: int = 1
    """The number of hosts. Open MPI and MPICH do not say: computed as if all hosts had as many ranks as this one."""
    size_variable: str = field(default="", compare=False)
    """The launcher's variable that world_size was read from; empty for ranks that we start."""

    @property
    def on_one_node(self) -> bool:
        return self.local_world_size == self.world_size


@dataclass(frozen=True)
class Launcher:
    """A launcher and the names of its variables.

    signs: alternatives; a process that has all variables of one of them was started by this launcher.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node_rank: str = ""
    hosts: str = ""
    job: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[str, ...]:
        """The variables that every rank of this launcher has."""
        return (self.rank, self.world_size, self.local_rank, self.local_world_size)

    def started(self, environ: Mapping[str, str]) -> bool:
        return any(all(name in environ for name in names) for names in self.signs)


_PLAIN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

TORCHRUN = Launcher(
    "torchrun",
    (("TORCHELASTIC_RUN_ID",),),
    *_PLAIN,
    node_rank="GROUP_RANK",
    hosts="GROUP_WORLD_SIZE",
    # Without TORCHELASTIC_RESTART_COUNT: hosts count restarts apart from each other.
    job=("TORCHELASTIC_RUN_ID",),
)
DEEPSPEED = Launcher(
    "deepspeed",
    (("CROSS_RANK", "LOCAL_SIZE"),),
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    node_rank="CROSS_RANK",
    hosts="CROSS_SIZE",
)
EXPLICIT = Launcher("the environment", (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",)), *_PLAIN)
OPENMPI = Launcher(
    "openmpi",
    (("OMPI_COMM_WORLD_RANK",),),
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
MPICH = Launcher(
    "mpich",
    (("PMI_RANK", "MPI_LOCALRANKID"),),
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    job=("PMI_JOBID",),
)
SLURM = Launcher(
    "slurm",
    (("SLURM_STEP_ID", "SLURM_PROCID"),),
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    node_rank="SLURM_NODEID",
)
PMI_ONLY = replace(MPICH, signs=(("PMI_RANK",),))
# MPI before SLURM: mpirun starts its daemons with srun, so its ranks inherit a daemon's place in a step.
LAUNCHERS = (TORCHRUN, DEEPSPEED, EXPLICIT, OPENMPI, MPICH, SLURM, PMI_ONLY)


def rank_info(environ: Mapping[str, str] | None = None) -> RankInfo | None:
    """Return the rank that a launcher gave this process, or None without a launcher.

    A SLURM step with a single task counts as no launcher, but for the rank of `megalite launch`: it is a shell to start
    local ranks in. Raises LaunchError with names and values of variables that are missing or contradict each other, and
    in the shell of a SLURM allocation for several tasks.
    """
    environ = os.environ if environ is None else environ
    launcher = next((each for each in LAUNCHERS if each.started(environ)), None)
    if launcher is None or (launcher is SLURM and in_shell(environ)):
        refuse_shell(environ)
        return None
    if launcher is SLURM:
        if environ.get(SLURM.world_size) == "1" and "MEGALITE_COORDINATOR" not in environ:
            return None
        info = _from_slurm(environ)
    elif launcher in (OPENMPI, MPICH, PMI_ONLY):
        info = _from_mpi(environ, launcher)
    else:
        info = _from_plain(environ, launcher)
    _refuse_contradictions(environ, launcher, info)
    return info


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
            node_rank=0,
        )
        for rank in range(world_size)
    )


def _from_plain(environ: Mapping[str, str], launcher: Launcher) -> RankInfo:
    """Read RANK and its companions, which torchrun, deepspeed and megalite launch set, or somebody by hand."""
    if launcher is EXPLICIT and "LOCAL_WORLD_SIZE" not in environ and "LOCAL_SIZE" in environ:
        launcher = replace(launcher, local_world_size="LOCAL_SIZE")
    _require(environ, launcher, *launcher.sizes, "MASTER_ADDR", "MASTER_PORT")
    return _checked(
        environ,
        launcher,
        local_world_size=_integer(environ, launcher.local_world_size, launcher),
        master_addr=environ["MASTER_ADDR"].strip(),
        master_port=_integer(environ, "MASTER_PORT", launcher),
    )


def _from_mpi(environ: Mapping[str, str], launcher: Launcher) -> RankInfo:
    """Read the variables of mpirun, which sets the rank, but not the master address and port."""
    _require(environ, launcher, *launcher.sizes)
    world_size = _integer(environ, launcher.world_size, launcher)
    local_world_size = _integer(environ, launcher.local_world_size, launcher)
    if "MASTER_PORT" in environ:
        port = _integer(environ, "MASTER_PORT", launcher)
    elif launcher is OPENMPI and environ.get("PMIX_NAMESPACE", "").isdecimal():
        port = port_of_job(int(environ["PMIX_NAMESPACE"]), 0)
    elif "SLURM_JOB_ID" in environ:
        # Without the step: mpirun's daemons run in a step whose id may differ between nodes.
        port = port_of_job(_integer(environ, "SLURM_JOB_ID", launcher), 0)
    else:
        port = DEFAULT_PORT
    return _checked(
        environ,
        launcher,
        local_world_size=local_world_size,
        master_addr=environ.get("MASTER_ADDR", "").strip()
        or (LOOPBACK if local_world_size == world_size else ""),
        master_port=port,
    )


def _from_slurm(environ: Mapping[str, str]) -> RankInfo:
    _require(environ, SLURM, *SLURM.sizes, SLURM.node_rank)
    world_size = _integer(environ, SLURM.world_size, SLURM)
    node_rank = _integer(environ, SLURM.node_rank, SLURM)
    tasks = tasks_per_node(environ[SLURM.local_world_size], SLURM.local_world_size)
    if node_rank >= len(tasks) or sum(tasks) != world_size:
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE = {environ[SLURM.local_world_size]!r} does not fit SLURM_NODEID = "
            f"{node_rank} and {SLURM.world_size} = {world_size}"
        )
    nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    _require(environ, SLURM, "SLURM_JOB_ID", nodes)
    if "MASTER_PORT" in environ:
        port = _integer(environ, "MASTER_PORT", SLURM)
    else:
        port = port_of_job(*(_integer(environ, name, SLURM) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")))
    info = _checked(
        environ,
        SLURM,
        local_world_size=tasks[node_rank],
        master_addr=environ.get("MASTER_ADDR")
        or (LOOPBACK if len(tasks) == 1 else node_names(environ[nodes], nodes)[0]),
        master_port=port,
    )
    return replace(info, job=f"slurm {step_identity(environ)}", hosts=len(tasks))


def _checked(
    environ: Mapping[str, str],
    launcher: Launcher,
    *,
    local_world_size: int,
    master_addr: str,
    master_port: int,
) -> RankInfo:
    """Return the rank; LaunchError where numbers lie outside of each other."""
    rank, world_size, local_rank = (_integer(environ, name, launcher) for name in launcher.sizes[:3])
    if launcher.hosts and launcher.hosts in environ:
        hosts = _integer(environ, launcher.hosts, launcher)
    else:
        hosts = ceil(world_size / max(1, local_world_size))
    info = RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=master_addr,
        master_port=master_port,
        launcher=launcher.name,
        node=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        job=next((f"{launcher.name} {environ[name]}" for name in launcher.job if environ.get(name)), ""),
        node_rank=_integer(environ, launcher.node_rank, launcher)
        if launcher.node_rank in environ
        else (0 if local_world_size == world_size else None),
        hosts=hosts,
        size_variable=launcher.world_size,
    )
    bounds = (
        (launcher.rank, rank, 0, world_size - 1, launcher.world_size, world_size),
        (
            launcher.local_rank,
            local_rank,
            0,
            local_world_size - 1,
            launcher.local_world_size,
            local_world_size,
        ),
        (launcher.local_world_size, local_world_size, 1, world_size, launcher.world_size, world_size),
        (launcher.hosts, hosts, 1, world_size, launcher.world_size, world_size),
        (launcher.node_rank, info.node_rank or 0, 0, hosts - 1, launcher.hosts, hosts),
    )
    for name, value, least, most, other, size in bounds:
        if not least <= value <= most:
            raise LaunchError(f"{name} = {value} does not fit {other} = {size}, as set by {launcher.name}")
    if not 1 <= master_port <= 65535:
        raise LaunchError(f"MASTER_PORT = {master_port} is not a port; use a number from 1 to 65535")
    return info


def _refuse_contradictions(environ: Mapping[str, str], launcher: Launcher, info: RankInfo) -> None:
    """Raise LaunchError where another launcher's variables show that `info` is stale, or one of several lone worlds."""
    for other in (OPENMPI, PMI_ONLY, SLURM):
        size, place = environ.get(other.world_size, ""), environ.get(other.rank, "")
        if (
            other.rank == launcher.rank
            or not other.started(environ)
            or not (size.isdecimal() and place.isdecimal())
        ):
            continue
        stated = f"{other.rank} = {place}, {other.world_size} = {size}"
        # torchrun and deepspeed number their own ranks, and a daemon of mpirun has its own place in a step.
        if launcher in (EXPLICIT, SLURM) and int(size) == info.world_size and int(place) != info.rank:
            raise LaunchError(
                f"{launcher.rank} = {info.rank}, {launcher.world_size} = {info.world_size}, but {stated}: one of them "
                f"is left from an earlier command; unset {', '.join(launcher.sizes)} to use the rank of {other.name}"
            )
        first_start = (
            environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        )  # a later one may go on with fewer hosts
        alone = launcher in (TORCHRUN, DEEPSPEED) and info.hosts == 1 and first_start
        if int(size) > 1 and (alone or (info.world_size == 1 and launcher is not OPENMPI)):
            raise LaunchError(
                f"{stated}, but {launcher.world_size} = {info.world_size}, as set by {launcher.name}: {size} separate "
                f"jobs would train the same run; {_remedy_for_lone_worlds(launcher, other, size)}"
            )


def _remedy_for_lone_worlds(launcher: Launcher, other: Launcher, size: str) -> str:
    start = "srun --ntasks=1" if other is SLURM else "mpirun -n 1"
    if launcher is TORCHRUN:
        many = f"give torchrun --nnodes {size} and one --rdzv-endpoint HOST:PORT for all"
        return f"{many}, or start one torchrun ({start})"
    if launcher is EXPLICIT:
        return f"unset {', '.join(launcher.sizes)} to use the ranks of {other.name}"
    return f"start {launcher.name} once ({start}), and let it start all ranks"


def _require(environ: Mapping[str, str], launcher: Launcher, *names: str) -> None:
    """Raise LaunchError with all of `names` that are not set or empty."""
    missing = [name for name in names if not environ.get(name, "").strip()]
    if not missing:
        return
    known = (launcher.rank, launcher.world_size, launcher.local_rank)
    present = [f"{name} = {environ[name]}" for name in known if environ.get(name, "").strip()]
    message = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
    if present:
        message += f", but {', '.join(present)} {'is' if len(present) == 1 else 'are'}"
    if launcher is EXPLICIT:
        unset = ", ".join(name for name in _PLAIN if name in environ)
        raise LaunchError(f"{message}; set {', '.join(missing)} in every rank too, or unset {unset}")
    raise LaunchError(
        f"{message}, and {launcher.name} sets all of them; start the command with {launcher.name} directly: a wrapper "
        "or `env -i` between them has dropped variables"
    )


def _integer(environ: Mapping[str, str], name: str, launcher: Launcher) -> int:
    value = environ[name].strip()
    if not re.fullmatch(r"[0-9]+", value):
        raise LaunchError(f"{name} = {value!r} is not a whole number, as {launcher.name} would set it")
    return int(value)
