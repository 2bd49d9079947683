"""The preflight over ssh and srun: what a host lacks is said before a rank starts, and nothing is left there."""

import subprocess

import pytest

from tests.support import hosts as namespaces
from tests.support.hosts import PYTHON, ROOT, Hosts

pytestmark = pytest.mark.extended

ENVIRONMENT = {"PYTHONPATH": str(ROOT)}


def doctor(hosts: Hosts, *arguments: str, **place) -> subprocess.CompletedProcess:
    command = [
        PYTHON,
        "-m",
        "megalite",
        "doctor",
        "--hostfile",
        str(hosts.hostfile(slots=2)),
        *arguments,
    ]
    return hosts[0].run(command, env=ENVIRONMENT, timeout=60, merged=True, **place)


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error")]


def run_file(folder, learning_rate: str):
    (folder / "run.toml").write_text(
        f'[run]\nfolder = "{folder}/runs"\n[model]\npreset = "tiny"\n[data]\nsource = "stdlib"\n'
        f"[training]\nsteps = 2\nsequence_length = 32\nmicro_batch_size = 1\nglobal_batch_size = 4\n"
        f"[parallel]\ndata = 4\n[optimizer]\nlearning_rate = {learning_rate}\n"
    )
    return str(folder / "run.toml")


def test_two_hosts_pass_and_nothing_is_left_on_them(hosts, tmp_path):
    done = doctor(hosts, run_file(tmp_path, "1e-3"))
    assert done.returncode == 0, done.stdout
    rows = {line[:14].strip(): line[14:].split() for line in done.stdout.splitlines()}
    assert rows["address"] == ["10.77.0.10", "eth0", "10.77.0.11", "eth0"]
    assert rows["to first"] == ["-", "yes"] == rows["from first"] and rows["to launcher"] == ["yes", "yes"]
    assert rows["run folder"] == ["shared", "shared"]
    assert not hosts[0].processes("python") and not hosts[1].processes("python")
    assert not list(tmp_path.glob(".megalite*"))


def test_a_file_and_a_folder_that_only_one_host_has(hosts, tmp_path):
    (tmp_path / "here").mkdir()
    path = run_file(tmp_path / "here", "1e-3")
    hosts[1].private(tmp_path / "here")
    done = doctor(hosts, path)
    said = errors(done.stdout)
    assert done.returncode == 2 and len(said) == 2, done.stdout
    assert said[0].startswith(f"error: n1: {path} cannot be read: No such file or directory; copy it there")
    assert "/here/runs is another folder than the first host's" in said[1]
    hosts[1].private(tmp_path)  # and now the working folder is missing too
    gone = doctor(hosts, path, cwd=tmp_path / "here")
    assert errors(gone.stdout) == [
        f"error: n1: the working folder {tmp_path}/here does not exist; "
        "make the folder there, or launch from a folder that all hosts share"
    ]


def test_debians_hosts_file_is_no_obstacle(tmp_path):
    if reason := namespaces.missing():
        pytest.skip(reason)
    with Hosts.up(2, own_address="127.0.1.1") as hosts:
        done = doctor(hosts)
        assert done.returncode == 0, done.stdout
        assert "note: n0, n1: the host's own name has the address 127.0.1.1" in done.stdout
        assert "10.77.0.11 eth0" in done.stdout


def test_a_host_that_is_gone_is_named_before_anything_starts(hosts):
    hosts[1].die()
    done = doctor(hosts, "--preflight-seconds", "4")
    assert done.returncode == 2
    (said,) = errors(done.stdout)
    assert said.startswith("error: n1: cannot be reached: ssh: ") or said.startswith(
        "error: n1: gave no answer"
    )


def test_an_interface_that_one_host_lacks(hosts):
    hosts[1].run(["ip", "link", "set", "eth0", "down"], check=True)
    hosts[1].run(["ip", "link", "set", "eth0", "name", "enp3s0"], check=True)
    hosts[1].run(["ip", "link", "set", "enp3s0", "up"], check=True)
    done = doctor(hosts)
    assert done.returncode == 0 and "10.77.0.11 enp3s0" in done.stdout, done.stdout


def test_an_allocation_is_asked_over_srun(slurm, tmp_path):
    (tmp_path / "job.sh").write_text(
        f"#!/bin/sh\n{PYTHON} -m megalite doctor {run_file(tmp_path, '1e-3')} > {tmp_path}/said 2>&1\n"
    )
    job = slurm.submit("--nodes=2", "--ntasks-per-node=2", tmp_path / "job.sh", env=ENVIRONMENT, cwd=ROOT)
    ended = slurm.wait(job)
    said = (tmp_path / "said").read_text()
    assert ended["JobState"] == "COMPLETED" and said.endswith("all hosts can run the job\n"), said
    assert said.startswith(f"asking 2 hosts of the SLURM job {job}\n")
    assert "10.77.0.10 eth0    10.77.0.11 eth0" in said
