"""launch/deepspeed.sh and launch/mpirun.sh on two hosts: bad places, a cut link, another ssh port, much output."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.hosts import ROOT
from tests.support.jobs import Job
from tests.support.real_launchers import AS_ROOT, PYTHON, Started, ranks
from tests.support.waiting import soon, wait_until

pytestmark = pytest.mark.extended

# Script and variables of each launcher.
SCRIPTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "deepspeed": ("deepspeed.sh", {}),
    "openmpi": ("mpirun.sh", {"MPIRUN": "mpirun.openmpi", **AS_ROOT}),
    "mpich": ("mpirun.sh", {"MPIRUN": "mpirun.mpich"}),
}
LONG = ("--training.steps", "100000", "--checkpoint.every", "100000")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    folder = tmp_path / "a job"
    folder.mkdir()
    return Job.write(folder)


def start(hosts, launcher: str, job: Job, flags: Sequence[str], hostfile: str = "", **env: str) -> Started:
    """Start a script on n0, in the folder of its hosts; hostfile: its text."""
    script, variables = SCRIPTS[launcher]
    path = hosts.folder / "my hosts"
    path.write_text(hostfile or "n0 slots=2\nn1 slots=2\n")
    variables = {"PYTHON": PYTHON, "RUN": str(job.run_file), "HOSTFILE": str(path), **variables, **env}
    run_folder = ("--run.folder", str(job.run_file.with_name("run")))
    command = ["bash", str(ROOT / "launch" / script), *run_folder, *flags]
    return Started([(hosts[0], command, variables)], hosts.folder)


@pytest.mark.parametrize(
    "launcher", ["mpich", *(pytest.param(each, marks=pytest.mark.slow) for each in ("deepspeed", "openmpi"))]
)
def test_a_job_that_loses_a_host_ends_by_itself(hosts, job, launcher):
    """pdsh and mpirun return only when the link is back."""
    started = start(hosts, launcher, job, (*LONG, "--launch.heartbeat_seconds", "5"))
    started.until("step      2/")
    hosts[1].link(up=False)
    assert started.wait(within=5 + soon(15)) == [1], started.output
    assert re.search(r"error: rank [23] .* on n1: vanished .*: its host or the network", started.output)
    assert "though its host answers" not in started.output
    wait_until(lambda: not ranks(hosts), "ranks outlive the cable", 5 + soon(15))


def test_a_host_that_does_not_resolve_ends_the_job_before_a_rank_starts(hosts, job):
    started = start(hosts, "deepspeed", job, LONG, "n0 slots=2\nn9 slots=2\n")
    assert started.wait() == [2], started.output
    assert "error: n9: cannot be reached: ssh: Could not resolve hostname n9" in started.output
    assert "rank 0" not in started.output


# Runs at the start of each interpreter; in a rank it prints a MiB to each stream.
MUCH = """
import sys
if "-m megalite train" in " ".join(sys.orig_argv):
    for stream in (sys.stdout, sys.stderr):
        stream.write(("much output " + "x" * 1011 + "\\n") * 1024)
        stream.flush()
"""


@pytest.mark.parametrize(
    "launcher",
    ["deepspeed", *(pytest.param(each, marks=pytest.mark.slow) for each in ("openmpi", "mpich"))],
)
def test_ranks_write_a_mebibyte_each_over_another_ssh_port_beside_a_taken_port(
    hosts, job, tmp_path, launcher
):
    """Nothing is lost and nobody waits for a reader; PDSH_SSH_ARGS_APPEND is kept; nothing needs MASTER_PORT."""
    (tmp_path / "sitecustomize.py").write_text(MUCH)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    if launcher == "deepspeed":
        for host in hosts:
            host.run(["sh", "-c", "kill $(cat /run/sshd.pid); /usr/sbin/sshd -p 2222"], check=True)
        env["PDSH_SSH_ARGS_APPEND"] = "-p 2222 -o StrictHostKeyChecking=no"
    taken = hosts[0].popen([PYTHON, "-m", "http.server", "29500"], stdout=subprocess.DEVNULL)
    try:
        started = start(hosts, launcher, job, ("--training.steps", "2"), **env)
        assert started.wait() == [0], started.output[-5000:]
    finally:
        hosts[0].kill_tree(taken)
    assert started.output.count("much output ") == 4 * 2 * 1024
