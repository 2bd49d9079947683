"""Commands that start `python -m MODULE ...` with real launchers on the hosts of a test, and the jobs so started."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.support.hosts import PYTHON, Host, Hosts
from tests.support.waiting import PATIENCE, wait_until

# Open MPI refuses to run as root without these.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=n0:29400",
)
DEEPSPEED = ("-m", "deepspeed.launcher.runner")
# Two nodes with two tasks each.
TASKS = ("--nodes=2", "--ntasks-per-node=2")

Start = tuple[Host, list[str], dict[str, str]]


class Started:
    """Launchers that run on hosts, one process on each host that was given one."""

    def __init__(self, starts: Sequence[Start], cwd: Path) -> None:
        self.hosts: Hosts = starts[0][0].hosts
        self._outputs = [self.hosts.folder / f"output-{number}" for number in range(len(starts))]
        self.launchers = []
        for (host, command, env), path in zip(starts, self._outputs, strict=True):
            with path.open("w") as file:
                self.launchers.append(host.popen(command, env=env, cwd=cwd, stdout=file))

    @property
    def output(self) -> str:
        """All that was printed so far, on both hosts."""
        return "".join(path.read_text(errors="replace") for path in self._outputs)

    def wait(self, within: float = PATIENCE) -> list[int]:
        """Wait until all launchers have ended and return their exit codes, negative for a signal."""
        self._until(self._ended, within, "the launchers run")
        return [each.wait() for each in self.launchers]

    def until(self, text: str) -> None:
        """Wait until a text was printed."""
        self._until(lambda: text in self.output or self._ended(), PATIENCE, f"no {text!r}")
        assert text in self.output, f"ended without {text!r}:\n{self.output}"

    def gone(self, within: float) -> None:
        """Wait until no process is left on the hosts, of those that are not their own."""
        self._until(lambda: not self.hosts.processes(), within, "processes are left")

    def _ended(self) -> bool:
        return all(each.poll() is not None for each in self.launchers)

    def _until(self, condition: Callable[[], bool], within: float, otherwise: str) -> None:
        try:
            wait_until(condition, otherwise, within, every=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.hosts.processes()}\n{self.output}") from None


def run(
    kind: str,
    hosts: Hosts,
    module: Sequence[str],
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    cwd: Path | None = None,
) -> Started:
    """Start `python -m MODULE ...` as two ranks on each of two hosts; kind: a name in LAUNCHERS.

    `env` is added to the launcher's variables, `options` to its command line.
    """
    starts = [
        (host, [*command], variables | dict(env or {}))
        for host, command, variables in LAUNCHERS[kind](hosts, list(options), list(module))
    ]
    return Started(starts, cwd or hosts.folder)


def ranks(hosts: Hosts) -> dict[int, int]:
    """Return rank -> process id, as seen from outside, of the ranks that run on the hosts."""
    found = {}
    for pid, command in hosts.processes("-m megalite").items():
        if not re.match(rf"{re.escape(PYTHON)} (-u )?-m megalite (--local_rank=\d+ )?train", command):
            continue
        try:
            words = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        rank = variables.get("RANK", variables.get("OMPI_COMM_WORLD_RANK", variables.get("SLURM_PROCID")))
        if rank is not None:
            found[int(rank)] = pid
    return found


def mpi_path(hosts: Hosts, kind: str) -> dict[str, str]:
    """Return variables that put one MPI's `mpirun` and `mpiexec` first; kind: openmpi or mpich."""
    folder = hosts.folder / f"bin-{kind}"
    folder.mkdir(exist_ok=True)
    for name in ("mpirun", "mpiexec"):
        # A script: through a link MPICH would look for its proxy beside the link.
        (folder / name).write_text(f'#!/bin/sh\nexec /usr/bin/{name}.{kind} "$@"\n')
        (folder / name).chmod(0o755)
    path = {"PATH": f"{folder}:{Path(PYTHON).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}
    return path | (AS_ROOT if kind == "openmpi" else mpi4py_for_mpich(hosts))


def mpi4py_for_mpich(hosts: Hosts) -> dict[str, str]:
    """Return variables that let mpi4py's wheel find Debian's MPICH, whose library has another name there."""
    folder = hosts.folder / "lib-mpich"
    folder.mkdir(exist_ok=True)
    library = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    path = next(line.split()[-1] for line in library.splitlines() if "libmpich.so.12 " in line)
    if not (folder / "libmpi.so.12").exists():
        (folder / "libmpi.so.12").symlink_to(path)
    return {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(folder)}


def mpich_hostfile(hosts: Hosts) -> str:
    path = hosts.folder / "hostfile.mpich"
    path.write_text("".join(f"{host.name}:2\n" for host in hosts))
    return str(path)


def deepspeed(
    hosts: Hosts, options: list[str], module: list[str], env: dict[str, str] | None = None
) -> list[Start]:
    """`deepspeed --module`; --launcher is among the options."""
    command = [PYTHON, *DEEPSPEED, "--hostfile", str(hosts.hostfile()), *options, "--module", *module]
    return [(hosts[0], command, env or {})]


def deepspeed_mpich(hosts: Hosts, options: list[str], module: list[str]) -> list[Start]:
    """The module's command as a script: deepspeed 0.19.8 starts its MPICH helper wrongly with --module."""
    script, *arguments = str(Path(PYTHON).parent / module[0]), *module[1:]
    options = ["--launcher=mpich", *options]
    command = [PYTHON, *DEEPSPEED, "--hostfile", str(hosts.hostfile()), *options, script, *arguments]
    return [(hosts[0], command, mpi_path(hosts, "mpich"))]


def torchrun(hosts: Hosts, options: list[str], module: list[str]) -> list[Start]:
    command = [PYTHON, *TORCHRUN, "--nnodes=2", "--rdzv-id=job", *options, "-m", *module]
    return [(host, command, {"OMP_NUM_THREADS": "1"}) for host in hosts]


def mpirun_openmpi(hosts: Hosts, options: list[str], module: list[str]) -> list[Start]:
    exported = ["-x", "PATH", "-x", "PYTHONPATH"]
    command = [
        "mpirun.openmpi",
        "--hostfile",
        str(hosts.hostfile()),
        *exported,
        *options,
        PYTHON,
        "-m",
        *module,
    ]
    return [(hosts[0], command, AS_ROOT)]


def mpirun_mpich(hosts: Hosts, options: list[str], module: list[str]) -> list[Start]:
    command = ["mpirun.mpich", "-f", mpich_hostfile(hosts), "-n", "4", *options, PYTHON, "-m", *module]
    return [(hosts[0], command, mpi4py_for_mpich(hosts))]


def srun(hosts: Hosts, options: list[str], module: list[str]) -> list[Start]:
    return [(hosts[0], ["srun", *TASKS, *options, PYTHON, "-m", *module], {})]


def launch(hosts: Hosts, options: list[str], module: list[str], backend: str) -> list[Start]:
    """`megalite launch` for `megalite train`: on the hostfile, or in an allocation."""
    arguments = module[module.index("train") + 1 :]
    allocated = backend in ("srun", "deepspeed-slurm")
    hostfile = [] if allocated else ["--hostfile", str(hosts.hostfile())]
    command = [PYTHON, "-m", "megalite", "launch", *arguments, *hostfile, "--backend", backend, *options]
    if allocated:
        command = ["salloc", "--quiet", *TASKS, *command]
    mpich = backend.endswith("mpich")
    return [(hosts[0], command, mpi_path(hosts, "mpich" if mpich else "openmpi"))]


LAUNCHERS: dict[str, Callable[[Hosts, list[str], list[str]], list[Start]]] = {
    "deepspeed-pdsh": deepspeed,
    "deepspeed-openmpi": lambda hosts, options, module: deepspeed(
        hosts, ["--launcher=openmpi", *options], module, mpi_path(hosts, "openmpi")
    ),
    "deepspeed-mpich": deepspeed_mpich,
    "torchrun": torchrun,
    "openmpi": mpirun_openmpi,
    "mpich": mpirun_mpich,
    "srun": srun,
} | {
    f"launch-{backend}": partial(launch, backend=backend)
    for backend in ("ssh", "torchrun", "deepspeed", "deepspeed-mpich", "deepspeed-slurm", "mpirun", "srun")
}
