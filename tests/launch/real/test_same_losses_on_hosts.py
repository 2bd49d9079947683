"""A job of four ranks on two hosts computes under every real launcher what it computes on one machine, to the bit."""

import pytest

from tests.support.hosts import Hosts, missing
from tests.support.jobs import SIX_STEPS, curve
from tests.support.real_launchers import run

pytestmark = pytest.mark.extended


def slow(launcher):
    return pytest.param(launcher, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "launcher",
    [
        *("deepspeed-openmpi", "mpich", "launch-ssh", "launch-deepspeed", "launch-mpirun"),
        # The same launchers as in other rows, started the other way.
        *(slow(each) for each in ("deepspeed-mpich", "openmpi", "launch-torchrun")),
    ],
)
def test_same_losses_without_slurm(hosts, job, by_itself, tmp_path, launcher):
    check(hosts, job, by_itself, tmp_path / "run", launcher)


@pytest.mark.parametrize("launcher", [slow("srun"), "launch-srun", slow("launch-deepspeed-slurm")])
def test_same_losses_in_slurm(slurm, job, by_itself, tmp_path, launcher):
    check(slurm.hosts, job, by_itself, tmp_path / "run", launcher)


def check(hosts, job, by_itself, folder, launcher, **how):
    """Return the output of the job, which has the losses of one machine; how: as for `run`."""
    started = run(launcher, hosts, ["megalite", *job.arguments(folder, *SIX_STEPS)], **how)
    codes = started.wait(within=240)
    assert set(codes) == {0}, started.output
    assert curve(folder) == by_itself
    assert len(by_itself) == 6
    return started.output


@pytest.mark.parametrize("launcher", ["deepspeed-pdsh", "torchrun"])
def test_same_losses_where_a_hosts_own_name_is_a_loopback_address(job, by_itself, tmp_path, launcher):
    """As Debian writes /etc/hosts; these launchers do the same where it is the host's own address."""
    if reason := missing():
        pytest.skip(reason)
    with Hosts.up(2, own_address="127.0.1.1") as hosts:
        output = check(hosts, job, by_itself, tmp_path / "run", launcher)
        said = (
            "note: n0 means 127.0.1.1 here, which other hosts cannot reach: this host uses 10.77.0.10 (eth0)"
        )
        # deepspeed asks the first host for its addresses, and never uses its name.
        assert (said in output) is (launcher == "torchrun"), output
