"""Records what real launchers set for each rank, on 2 hosts with 2 ranks each.

`python -m tests.support.launcher_environments [NAME ...]` writes tests/launch/environments/NAME.json: the program's
version, the command, and for each process its host, the arguments that the launcher added and the launcher's
variables. Needs root and the packages of tests/launch/setup.sh.
"""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.hosts import ROOT, Host, Hosts
from tests.support.real_launchers import AS_ROOT, DEEPSPEED, PYTHON, TASKS, TORCHRUN, mpi_path, mpich_hostfile
from tests.support.slurm_cluster import SlurmCluster

FOLDER = ROOT / "tests" / "launch" / "environments"
SPEAKER = str(ROOT / "tests" / "support" / "speaking_rank.py")
RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class Recording:
    """One fresh pair of hosts, and the folder that its ranks write to."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.head: Host = hosts[0]
        self.told = hosts.folder / "told"
        self.told.mkdir()
        self.rank = [PYTHON, SPEAKER, str(self.told)]

    def deepspeed(
        self, *options: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()
    ) -> list[str]:
        command = [PYTHON, *DEEPSPEED, "--hostfile", str(self.hosts.hostfile()), *options]
        command = [*prefix, *command, SPEAKER, str(self.told)]
        self.head.run(command, env=env, timeout=300, check=True)
        return command

    def simple(self, *command: str, env: dict[str, str] | None = None) -> list[str]:
        self.head.run([*command, *self.rank], env=env, timeout=120, check=True)
        return [*command, *self.rank]

    def torchrun(self) -> list[str]:
        command = [PYTHON, *TORCHRUN, "--nnodes=2", "--rdzv-id=job", SPEAKER, str(self.told)]
        agents = [host.popen(command) for host in self.hosts]
        for agent in agents:
            output, _ = agent.communicate(timeout=120)
            assert agent.returncode == 0, output
        return command

    def batch(self) -> list[str]:
        slurm = SlurmCluster.up(self.hosts)
        script = self.hosts.folder / "batch.sh"
        script.write_text(f"#!/bin/bash\n{shlex.join(self.rank)}\n")
        command = [*TASKS, "--output=/run/batch.log", str(script)]
        slurm.wait(slurm.submit(*command), "COMPLETED")
        return ["sbatch", *command]

    def allocated(self, *command: str, env: dict[str, str] | None = None) -> list[str]:
        SlurmCluster.up(self.hosts)
        return self.simple("salloc", "--quiet", *TASKS, *command, env=env)

    def srun(self, *options: str) -> list[str]:
        SlurmCluster.up(self.hosts)
        return self.simple("srun", *TASKS, *options)

    def torchrun_in_srun(self) -> list[str]:
        SlurmCluster.up(self.hosts)
        agent = [PYTHON, *TORCHRUN, "--nnodes=2", "--rdzv-id=job", "--no-python"]
        return self.simple("srun", "--nodes=2", "--ntasks-per-node=1", *agent)

    def deepspeed_slurm(self) -> list[str]:
        SlurmCluster.up(self.hosts)
        prefix = ("salloc", "--quiet", *TASKS)
        return self.deepspeed("--launcher=slurm", "--launcher_args=--mpi=pmi2", prefix=prefix)


LAUNCHERS: dict[str, tuple[str, Callable[[Recording], list[str]]]] = {
    "deepspeed-pdsh": ("deepspeed", lambda on: on.deepspeed()),
    "deepspeed-openmpi": (
        "deepspeed",
        lambda on: on.deepspeed("--launcher=openmpi", env=mpi_path(on.hosts, "openmpi")),
    ),
    "deepspeed-mpich": (
        "deepspeed",
        lambda on: on.deepspeed("--launcher=mpich", env=mpi_path(on.hosts, "mpich")),
    ),
    "deepspeed-slurm": ("deepspeed", Recording.deepspeed_slurm),
    "torchrun": ("torch", Recording.torchrun),
    "openmpi": (
        "openmpi",
        lambda on: on.simple("mpirun.openmpi", "--hostfile", str(on.hosts.hostfile()), env=AS_ROOT),
    ),
    "mpich": ("mpich", lambda on: on.simple("mpirun.mpich", "-f", mpich_hostfile(on.hosts), "-n", "4")),
    "srun": ("slurm", Recording.srun),
    "srun-pmi2": ("slurm", lambda on: on.srun("--mpi=pmi2")),
    "batch-shell": ("slurm", Recording.batch),
    "salloc-shell": ("slurm", Recording.allocated),
    "torchrun-in-srun": ("torch", Recording.torchrun_in_srun),
    "openmpi-in-slurm": ("openmpi", lambda on: on.allocated("mpirun.openmpi", env=AS_ROOT)),
    "mpich-in-slurm": ("mpich", lambda on: on.allocated("mpirun.mpich", "-n", "4")),
}
VERSIONS = {
    "deepspeed": [
        PYTHON,
        "-c",
        "from importlib.metadata import version; print('deepspeed', version('deepspeed'))",
    ],
    "torch": [PYTHON, "-c", "from importlib.metadata import version; print('torch', version('torch'))"],
    "openmpi": ["bash", "-c", "mpirun.openmpi --version | head -n 1"],
    "mpich": ["bash", "-c", "mpirun.mpich --version | sed -n 's/ *Version: */mpich /p'"],
    "slurm": ["bash", "-c", "srun --version"],
}


def record(name: str) -> dict[str, Any]:
    """Start ranks with a launcher on fresh hosts and return what they told."""
    program, start = LAUNCHERS[name]
    with Hosts.up(2) as hosts:
        on = Recording(hosts)
        command = start(on)
        processes = [json.loads(path.read_text()) for path in on.told.glob("*.json")]
        told = {
            "program": on.head.run(VERSIONS[program], check=True).stdout.strip(),
            "command": shlex.join(command),
            "processes": sorted(processes, key=place),
        }
        text = json.dumps(told, indent=1)
    places = {str(Path(PYTHON)): "python", str(hosts.folder): "/run/hosts", str(ROOT): "/run/megalite"}
    for path, instead in places.items():
        text = text.replace(path, instead)
    return json.loads(text)


def place(process: dict[str, Any]) -> tuple[str, int]:
    variables = process["variables"]
    return process["host"], next((int(variables[name]) for name in RANK_NAMES if name in variables), 0)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or LAUNCHERS:
        told = record(name)
        (FOLDER / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")
        print(f"{name}: {len(told['processes'])} processes", flush=True)


if __name__ == "__main__":
    main()
