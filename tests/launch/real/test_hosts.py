"""The hosts and the SLURM that the other tests here run on: apart from each other, whole, and gone afterwards."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import ROOT, Hosts
from tests.support.jobs import running
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.extended

LEFT_BY_A_KILL = """
import os, signal, sys
from tests.support.hosts import Hosts
hosts = Hosts.up(2)
hosts[1].popen(["sleep", "1234"])
print(hosts.folder, hosts.keeper.pid, *[host.pid for host in hosts], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_host_has_a_name_an_address_and_processes_of_its_own(hosts):
    there = hosts[0].run(["ssh", "n1", "hostname; cat /proc/1/cmdline | tr '\\0' ' '"], check=True).stdout
    assert there.startswith("n1\n") and there.rstrip().endswith("n1")
    sleeper = hosts[1].popen(["sleep", "1234"])
    wait_until(lambda: hosts[1].processes("sleep 1234"), "no sleeper")
    assert not hosts[0].processes()
    hosts[0].run(["pkill", "sleep"])
    assert hosts[1].kill("sleep 1234") and sleeper.wait(timeout=PATIENCE)


def test_nothing_leads_out_of_the_hosts(hosts):
    routes = hosts[0].run(["ip", "-o", "route"], check=True).stdout
    assert routes.count("\n") == 1 and routes.startswith("10.77.0.0/24 dev eth0")
    assert hosts[0].run(["env"]).stdout.count("PYTEST_CURRENT_TEST") == 0


def test_a_cable_a_hosts_file_and_a_folder_are_a_hosts_own(hosts, tmp_path):
    reach = ["timeout", "3", "bash", "-c", "exec 3<>/dev/tcp/n1/22"]
    assert hosts[0].run(reach).returncode == 0
    hosts[1].link(up=False)
    assert hosts[0].run(reach).returncode != 0
    hosts[1].link(up=True)
    assert hosts[0].run(reach).returncode == 0
    (tmp_path / "file").touch()
    hosts[1].private(tmp_path)
    assert [host.run(["ls", tmp_path]).stdout for host in hosts] == ["file\n", ""]
    hosts[1].write_hosts("10.9.9.9 n0\n")
    assert [host.run(["getent", "hosts", "n0"]).stdout.split()[0] for host in hosts] == [
        "10.77.0.10",
        "10.9.9.9",
    ]


def test_a_host_that_dies_takes_its_processes_and_leaves_the_other(hosts):
    sleeper = hosts[1].popen(["sleep", "1234"])
    hosts[1].die()
    assert sleeper.wait(timeout=PATIENCE) != 0
    assert hosts[0].run(["hostname"]).stdout == "n0\n" and not hosts.processes()


def test_two_sets_of_hosts_do_not_see_each_other_and_leave_nothing(hosts):
    with Hosts.up(3, own_address="127.0.1.1") as others:
        assert others[2].run(["getent", "hosts", "n2"]).stdout.split()[0] == "127.0.1.1"
        assert others[2].run(["ssh", "n0", "hostname"], check=True).stdout == "n0\n"
        pids = [host.pid for host in others]
    assert not others.folder.exists() and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert hosts[1].run(["ssh", "n0", "hostname"], check=True).stdout == "n0\n"


def test_nothing_is_left_when_the_tests_are_killed(hosts):
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BY_A_KILL], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE
    )
    assert done.returncode == -signal.SIGKILL
    folder, *pids = done.stdout.split()
    wait_until(lambda: not Path(folder).exists(), f"{folder} is left")
    wait_until(lambda: not running(list(map(int, pids))), "a process is left")
    assert not Path(folder).exists()


def test_slurm_runs_a_job_on_both_nodes_and_requeues_it(slurm, tmp_path):
    script, log = tmp_path / "job.sbatch", tmp_path / "log"
    script.write_text(
        "#!/bin/bash\nsrun bash -c 'echo $SLURM_PROCID on $(hostname)'\n"
        '[ -n "${SLURM_RESTART_COUNT-}" ] || scontrol requeue "$SLURM_JOB_ID"\n'
    )
    options = ["--nodes=2", "--ntasks-per-node=2", "--open-mode=append", f"--output={log}"]
    ended = slurm.wait(slurm.submit(*options, script), "COMPLETED")
    assert ended["Restarts"] == "1"
    ranks = sorted(line for line in log.read_text().splitlines() if " on n" in line)
    assert ranks == sorted(2 * ["0 on n0", "1 on n0", "2 on n1", "3 on n1"])
