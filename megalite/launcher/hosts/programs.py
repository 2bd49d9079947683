"""Finds the programs of this machine that start ranks elsewhere: pdsh, and which MPI `mpirun` is of."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megalite.errors import LaunchError

Mpi = Literal["openmpi", "mpich", "intel", ""]
_SECONDS = 20.0


@dataclass(frozen=True)
class Programs:
    """pdsh: whether it is installed. mpi: the MPI of `mpirun`, "" without one. root: whether this user is root.

    mpirun: the program: MPIRUN, where the user has set it.
    """

    pdsh: bool = False
    mpi: Mpi = ""
    mpirun: str = "mpirun"
    root: bool = False
    root_allowed: bool = False
    """Whether Open MPI's two variables allow root."""


def find_programs(backend: str, environ: Mapping[str, str]) -> Programs:
    """Look for the programs that a backend needs; only mpirun is run, for its version."""
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    # deepspeed runs `mpirun`, whatever MPIRUN says.
    mpirun = environ.get("MPIRUN", "") if backend == "mpirun" else ""
    mpirun = mpirun or "mpirun"
    return Programs(
        pdsh=shutil.which("pdsh", path=environ.get("PATH")) is not None,
        mpirun=mpirun,
        mpi=_mpi_here(mpirun, environ)
        if backend in ("mpirun", "deepspeed-openmpi", "deepspeed-mpich", "deepspeed-impi")
        else "",
        root=os.geteuid() == 0,
        root_allowed=all(environ.get(name) == "1" for name in names),
    )


def mpi_of(version: str, program: str = "mpirun") -> Mpi:
    """Return the MPI whose `program` printed this for --version. Raises LaunchError for an unknown one."""
    if "Open MPI" in version or "OpenRTE" in version:
        return "openmpi"
    if "Intel(R) MPI" in version:
        return "intel"
    if "HYDRA" in version:
        return "mpich"
    line = next(iter(version.strip().splitlines()), "nothing")
    raise LaunchError(
        f"{program} --version says {line!r}, which is neither Open MPI, MPICH nor Intel MPI; put one of them first on "
        "PATH, or set MPIRUN to its mpirun"
    )


def _mpi_here(name: str, environ: Mapping[str, str]) -> Mpi:
    program = shutil.which(name, path=environ.get("PATH"))
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            env=dict(environ),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{program} --version failed: {error}; use another backend") from None
    return mpi_of(done.stdout + done.stderr, name)
