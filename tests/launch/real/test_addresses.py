"""Ranks that meet at an IPv6 address; tensor groups that hosts share; an interface that is not there."""

import pytest

from tests.launch.real.test_same_losses_on_hosts import check
from tests.support.real_launchers import run

pytestmark = pytest.mark.extended


def test_an_ipv6_master_and_ranks_dealt_out_to_the_hosts_in_turn(slurm, job, by_itself, tmp_path):
    for host in slurm.hosts:
        address = f"fd00::{10 + host.number}/64"
        host.run(["ip", "addr", "add", address, "dev", "eth0", "nodad"], check=True)
    output = check(
        slurm.hosts,
        job,
        by_itself,
        tmp_path / "run",
        "srun",
        env={"MASTER_ADDR": "fd00::10"},
        options=["--distribution=cyclic"],
    )
    assert "they meet at [fd00::10]:20001 (eth0)" in output, output
    assert "warning: 2 of 2 tensor-parallel groups span hosts (ranks 0 on n0, 1 on n1)" in output, output
    assert "srun: --distribution=block" in output


def test_an_interface_that_a_host_lacks_is_refused_with_those_that_it_has(slurm, job, tmp_path):
    started = run(
        "srun",
        slurm.hosts,
        ["megalite", *job.arguments(tmp_path / "run")],
        env={"GLOO_SOCKET_IFNAME": "eth7"},
    )
    assert started.wait() == [2], started.output
    said = "error: GLOO_SOCKET_IFNAME = 'eth7' names no interface of n1; it has lo (127.0.0.1), eth0 (10.77.0.11)"
    assert said in started.output
