"""The commands of every backend: golden files of argv, environment and files; what a remote shell makes of them.

MEGALITE_WRITE_GOLDEN=1 writes the golden files anew.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.errors import LaunchError
from megalite.launcher.hosts.backends import Job, shell_lines
from megalite.launcher.hosts.commands import BACKENDS, choose_backend
from megalite.launcher.hosts.hostfile import Host
from megalite.launcher.hosts.job_hosts import Hosts, Placed
from megalite.launcher.hosts.programs import Programs, mpi_of
from tests.support import reported_faults as faults
from tests.support.museum import exhibit

GOLDEN = Path(__file__).parent / "golden"
ALONE = (Placed("localhost", (0, 1, 2, 3), 0, False),)
SOME = (Placed("localhost", (0, 2), 0, True),)
TWO = (Placed("n0", (0, 1), 0, False), Placed("n1", (0, 1), 2, False))
CHOSEN = (Placed("n0", (0, 1), 0, False), Placed("n1", (1, 3), 2, True))
UNEQUAL = (Placed("n0", (0, 1, 2), 0, False), Placed("n1", (0,), 3, False))
AWKWARD = 'it\'s "100%" of $HOME `id` \\ é'

JOB = Job(
    source="hostfile",
    hosts=TWO,
    arguments=("train", "my run.toml", "--training.steps", "3", "--run.folder", "runs/it's $1"),
    folder=Path("/jobs/my-model"),
    python="/opt/venv/bin/python",
    exported={"PATH": "/opt/venv/bin:/usr/bin", "GLOO_SOCKET_IFNAME": "eth0", "NOTE": "a 'b' $c"},
    port=29500,
    scratch=Path("/tmp/megalite-launch-7"),
)
LOCAL = replace(JOB, source="local", hosts=ALONE)
ALLOCATION = replace(JOB, source="slurm")
OPEN_MPI, MPICH, INTEL = Programs(mpi="openmpi"), Programs(mpi="mpich"), Programs(mpi="intel")

CASES = {
    "local": ("local", LOCAL, Programs()),
    "local-chosen": ("local", replace(LOCAL, hosts=SOME, devices="3,1,0"), Programs()),
    "ssh": ("ssh", replace(JOB, hosts=CHOSEN, extra=("-p", "2222")), Programs()),
    "ssh-unequal": ("ssh", replace(JOB, hosts=UNEQUAL), Programs()),
    "torchrun": ("torchrun", JOB, Programs()),
    "torchrun-local": ("torchrun", LOCAL, Programs()),
    "srun": ("srun", replace(ALLOCATION, extra=("--cpu-bind=none",)), Programs()),
    "mpirun-openmpi": ("mpirun", replace(JOB, interface="eth0"), OPEN_MPI),
    "mpirun-openmpi-local": ("mpirun", LOCAL, OPEN_MPI),
    "mpirun-mpich": ("mpirun", replace(JOB, interface="eth0"), MPICH),
    "mpirun-intel": ("mpirun", replace(JOB, hosts=UNEQUAL), INTEL),
    "deepspeed-pdsh": ("deepspeed", JOB, Programs(pdsh=True)),
    "deepspeed-pdsh-chosen": ("deepspeed", replace(JOB, hosts=CHOSEN), Programs(pdsh=True)),
    "deepspeed-local": ("deepspeed", LOCAL, Programs()),
    "deepspeed-local-devices": ("deepspeed", replace(LOCAL, devices="3,1,0,2"), Programs()),
    "deepspeed-openmpi": ("deepspeed-openmpi", replace(JOB, interface="eth0"), OPEN_MPI),
    "deepspeed-mpich": ("deepspeed-mpich", JOB, MPICH),
    "deepspeed-impi": ("deepspeed-impi", JOB, INTEL),
    "deepspeed-slurm": ("deepspeed-slurm", ALLOCATION, Programs()),
}  # fmt: skip


def described(name: str) -> str:
    """One word of each command a line, its environment and the files that it reads."""
    backend, job, programs = CASES[name]
    start = BACKENDS[backend](job, programs)
    lines = []
    for command in start.commands:
        lines += [f"host: {command.host or 'all'}"]
        lines += [f"  set {key}={value}" for key, value in command.environ.items()]
        lines += [f"  {word}" for word in command.argv]
    for path, text in start.files.items():
        lines += [f"file: {path}", *(f"  {line}" for line in text.splitlines())]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_commands_are_the_golden_ones(name):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("MEGALITE_WRITE_GOLDEN") == "1":
        path.write_text(described(name))
    assert described(name) == path.read_text()


def test_every_backend_has_a_golden_file():
    assert {backend for backend, _, _ in CASES.values()} == set(BACKENDS)
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


PRINTER = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get('NOTE')]))"


def as_remote_shell_reads(line: str, tmp_path: Path) -> list:
    """Run a line as ssh or pdsh would, with an interpreter that tells its arguments, folder and NOTE."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nexec python3 -c "$PRINTER" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", line],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PRINTER": PRINTER},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def awkward_job(tmp_path: Path, folder: str) -> Job:
    (tmp_path / folder).mkdir()
    return replace(
        JOB,
        folder=tmp_path / folder,
        python=str(tmp_path / "python"),
        arguments=("train", AWKWARD, "two words", "$x"),
        exported={"NOTE": AWKWARD},
    )


@pytest.mark.parametrize("backend", ["ssh", "torchrun"])
def test_arguments_folder_and_variables_reach_another_host_unchanged(tmp_path, backend):
    job = awkward_job(tmp_path, "a b's $c")
    command = BACKENDS[backend](job, Programs()).commands[0]
    arguments, folder, note = as_remote_shell_reads(command.argv[-1], tmp_path)
    assert arguments[-4:] == ["train", AWKWARD, "two words", "$x"]
    assert (folder, note) == (str(job.folder), AWKWARD)


@pytest.mark.extended
def test_arguments_and_variables_reach_pdsh_hosts_unchanged(tmp_path):
    """DeepSpeed's own code makes the line; pdsh replaces %-codes in it."""
    from deepspeed.launcher.multinode_runner import PDSHRunner
    from deepspeed.launcher.runner import parse_args

    job = awkward_job(tmp_path, "folder")
    start = BACKENDS["deepspeed"](job, Programs(pdsh=True))
    command, (variables,) = start.commands[0], list(start.files.values())[1:]
    arguments = parse_args(command.argv[3:])
    arguments.master_addr, runner = "n0", PDSHRunner(arguments, "e30=")
    for line in variables.splitlines():
        runner.add_export(*line.split("=", maxsplit=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(job.folder)
        patch.setattr("sys.executable", job.python)
        argv, _, _ = runner.get_cmd({}, {"n0": [0, 1], "n1": [0, 1]})
    line = " ".join(argv[argv.index("-w") + 2 :]).replace("%n", "0").replace("%%", "%")
    told, folder, note = as_remote_shell_reads(line, tmp_path)
    assert told[-4:] == ["train", AWKWARD, "two words", "$x"]
    assert (folder, note) == (str(job.folder), AWKWARD)


def test_a_pasted_line_is_the_command():
    start = BACKENDS["mpirun"](JOB, MPICH)
    *file, line = shell_lines(start)
    assert file == [
        "mkdir -p /tmp/megalite-launch-7",
        "cat > /tmp/megalite-launch-7/hosts <<'END'",
        *("n0:2", "n1:2", "END"),
    ]
    [command] = start.commands
    words = shlex.split(line)
    assert words == [*(f"{name}={value}" for name, value in command.environ.items()), *command.argv]


REFUSED = {
    "local on hosts": ("local", JOB, Programs(), "starts ranks on this machine only, not on n0, n1"),
    "ssh alone": ("ssh", LOCAL, Programs(), "needs --hostfile or a SLURM allocation; use --backend local"),
    "srun outside": ("srun", JOB, Programs(), r"needs a SLURM allocation \(SLURM_JOB_ID is not set\)"),
    "srun unequal": ("srun", replace(ALLOCATION, hosts=UNEQUAL), Programs(), "n0 3, n1 1; use --slots 1"),
    "srun chosen": ("srun", replace(ALLOCATION, hosts=CHOSEN), Programs(), "cannot choose slots .* on n1"),
    "no mpirun": ("mpirun", JOB, Programs(), "there is no mpirun on PATH"),
    "root": ("mpirun", JOB, replace(OPEN_MPI, root=True), "set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW"),
    "mpirun chosen": ("mpirun", replace(JOB, hosts=CHOSEN), MPICH, "cannot choose slots"),
    "no pdsh": ("deepspeed", JOB, Programs(), "there is no pdsh on PATH; install it, or use --backend ssh"),
    "a space": ("deepspeed", replace(JOB, folder=Path("/my work")), Programs(pdsh=True), "'/my work' has char"),
    "a trailing space": (
        "deepspeed", replace(JOB, exported={"A": "b "}), Programs(pdsh=True), "A begins or ends with a space",
    ),
    "the other MPI": ("deepspeed-mpich", JOB, OPEN_MPI, "runs mpirun, which is of openmpi; put the mpirun of"),
    "unequal": ("deepspeed-mpich", replace(JOB, hosts=UNEQUAL), MPICH, "the hosts have n0 3, n1 1"),
    "quotes": (
        "deepspeed-openmpi", replace(JOB, exported={"PYTHONPATH": "/a b"}), OPEN_MPI, "would put quotes around",
    ),
    "slurm outside": ("deepspeed-slurm", JOB, Programs(), "needs a SLURM allocation"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_backend_refuses_what_it_would_start_otherwise(name):
    backend, job, programs, message = REFUSED[name]
    with pytest.raises(LaunchError, match=message):
        BACKENDS[backend](job, programs)


def test_open_mpi_takes_root_where_it_is_allowed():
    root = replace(OPEN_MPI, root=True)
    assert BACKENDS["mpirun"](JOB, replace(root, root_allowed=True)).commands
    assert BACKENDS["mpirun"](replace(JOB, extra=("--allow-run-as-root",)), root).commands


@pytest.mark.parametrize(("source", "backend"), [("local", "local"), ("slurm", "srun"), ("hostfile", "ssh")])
def test_the_backend_follows_from_the_hosts(source, backend):
    assert choose_backend(Hosts(source, "them", (Host("n0", (0,)),))) == backend


@pytest.mark.parametrize(
    ("version", "mpi"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...", "openmpi"),
        ("mpirun.real (OpenRTE) 3.0.0", "openmpi"),
        ("HYDRA build details:\n    Version:       4.0.2\n", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.12 Build 20240213\n", "intel"),
    ],
)
def test_the_mpis_are_told_apart(version, mpi):
    assert mpi_of(version) == mpi


def test_an_unknown_mpirun_is_named():
    with pytest.raises(LaunchError, match=r"mpirun --version says 'my own mpirun 1.0', which is neither"):
        mpi_of("my own mpirun 1.0\nmore")


@exhibit(
    "DeepSpeed#2802",
    subject="launch",
    there="the user's launcher arguments and those of the program replaced each other",
    here="both are passed on",
    fault=faults.LAUNCHER_ARGUMENTS_ARE_REPLACED,
    case="typed0",
)
@pytest.mark.parametrize("typed", [["--launcher_args=--x 'a b'"], ["--launcher_args", "--x 'a b'"]])
def test_the_users_arguments_for_deepspeeds_launcher_do_not_replace_ours(typed):
    """DeepSpeed takes the last --launcher_args alone: the variables would not travel."""
    job = replace(JOB, extra=(*typed, "--save_pid"))
    argv = BACKENDS["deepspeed-mpich"](job, MPICH).commands[0].argv
    [ours] = [word for word in argv if word.startswith("--launcher_args")]
    alone = BACKENDS["deepspeed-mpich"](JOB, MPICH).commands[0].argv
    [without] = [word for word in alone if word.startswith("--launcher_args")]
    assert ours == f"{without} --x 'a b'" and "--launcher_args" not in argv and "--save_pid" in argv


class CountedHosts(tuple[Placed, ...]):
    """Hosts that count how often they are gone through."""

    passes = 0

    def __iter__(self) -> Iterator[Placed]:
        type(self).passes += 1
        return super().__iter__()


def test_a_command_for_each_host_does_not_go_through_all_hosts() -> None:
    hosts = CountedHosts(Placed(f"n{number}", (0, 1), 2 * number, False) for number in range(50))
    commands = BACKENDS["ssh"](replace(JOB, hosts=hosts), Programs()).commands
    assert len(commands) == 50 and CountedHosts.passes <= 3
