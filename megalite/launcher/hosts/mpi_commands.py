"""The command of mpirun, for Open MPI, and for MPICH and Intel MPI, which share Hydra's options."""

from collections.abc import Mapping

from megalite.errors import LaunchError
from megalite.launcher.hosts.backends import (
    Command,
    Job,
    Start,
    counted_file,
    require_first_slots,
    slots_file,
)
from megalite.launcher.hosts.programs import Programs


def mpirun(job: Job, programs: Programs) -> Start:
    """Start all ranks with mpirun, in the order of the hosts.

    Raises LaunchError without mpirun, for slots chosen by number, and where Open MPI would refuse root.
    """
    require_first_slots(job, "mpirun")
    if not programs.mpi:
        named = "on PATH" if programs.mpirun == "mpirun" else "(MPIRUN)"
        raise LaunchError(
            f"--backend mpirun: there is no {programs.mpirun} {named}; install Open MPI or MPICH, or use ssh"
        )
    exported = {**job.exported, "MASTER_ADDR": job.master, "MASTER_PORT": str(job.port)}
    open_mpi = programs.mpi == "openmpi"
    if open_mpi:
        require_root_allowed(programs, "mpirun", job.extra)
    hostfile = job.scratch / "hosts"
    options = _open_mpi(job, exported, str(hostfile)) if open_mpi else _hydra(job, exported, str(hostfile))
    text = slots_file(job.hosts) if open_mpi else counted_file(job.hosts)
    argv = (programs.mpirun, "-n", str(job.world_size), *options, *job.extra, *job.rank_command)
    return Start((Command(argv, exported),), {hostfile: text})


def require_root_allowed(programs: Programs, backend: str, extra: tuple[str, ...]) -> None:
    """Raise LaunchError where Open MPI would refuse to start ranks as root."""
    if programs.root and not programs.root_allowed and "--allow-run-as-root" not in extra:
        raise LaunchError(
            f"--backend {backend}: Open MPI's mpirun refuses to run as root; as root in a container, set "
            "OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        )


def _open_mpi(job: Job, exported: dict[str, str], hostfile: str) -> list[str]:
    options = ["--hostfile", hostfile, "--map-by", "slot", "--bind-to", "none", "--wdir", str(job.folder)]
    if job.interface:
        options += ["--mca", "oob_tcp_if_include", job.interface]
    for name in exported:
        options += ["-x", name]
    return options


def _hydra(job: Job, exported: dict[str, str], hostfile: str) -> list[str]:
    options = ["-f", hostfile, "-bind-to", "none", "-wdir", str(job.folder)]
    if job.interface:
        options += ["-iface", job.interface]
    return [*options, *hydra_variables(exported)]


def hydra_variables(exported: Mapping[str, str]) -> list[str]:
    """Return the options that carry exactly these variables to other hosts."""
    # -genvlist NAME,NAME would keep values out of the command line, but MPICH 4.0 loses one of them.
    return ["-genvnone", *(word for name, value in exported.items() for word in ("-genv", name, value))]
