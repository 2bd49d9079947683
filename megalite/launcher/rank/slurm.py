"""Reads SLURM's compact lists, and tells the shell of an allocation from the tasks of a step."""

import re
from collections.abc import Mapping, Sequence
from itertools import product

from megalite.errors import LaunchError

# SLURM's reserved step ids (slurm.h): the shell of `salloc` on a node of the allocation, and the batch script.
_SHELL_STEPS = (str(0xFFFFFFFA), str(0xFFFFFFFB))
_PORTS = range(20000, 30000)  # below the ephemeral ports of Linux


def tasks_per_node(compact: str, variable: str = "SLURM_STEP_TASKS_PER_NODE") -> tuple[int, ...]:
    """Expand "2(x3),1" to (2, 2, 2, 1)."""
    counts: list[int] = []
    for item in compact.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", item.strip())
        if match is None:
            raise LaunchError(f"{variable} = {compact!r} is not a list like '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def node_names(compact: str, variable: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """Expand "gpu[08-10,12],login" to its node names in order: gpu08, gpu09, gpu10, gpu12, login."""
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


def step_identity(environ: Mapping[str, str]) -> str:
    """Return "job.step.restarts": the same in all tasks of a step, another one after a requeue."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(environ.get(name, "0") for name in names)


def port_of_job(job: int, step: int) -> int:
    """Return a port for the rendezvous: jobs that share a node must not meet on the same one."""
    return _PORTS[(job + step) % len(_PORTS)]


def in_shell(environ: Mapping[str, str]) -> bool:
    """Return whether this is the batch script of a job or the shell of salloc, which are no tasks of a step."""
    step = environ.get("SLURM_STEP_ID", _SHELL_STEPS[0])
    return "SLURM_JOB_ID" in environ and step in _SHELL_STEPS


def refuse_shell(environ: Mapping[str, str]) -> None:
    """Raise LaunchError in the shell of an allocation for several tasks: it looks like rank 0, but is no task."""
    sizes = {name: environ[name] for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES") if name in environ}
    if in_shell(environ) and any(size != "1" for size in sizes.values()):
        allocation = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        raise LaunchError(
            f"this is the shell of SLURM job {environ['SLURM_JOB_ID']}, allocated with {allocation}, and none of its "
            "tasks; start the ranks with srun: `srun python -m megalite train RUN.toml`, as launch/slurm.sbatch does"
        )
