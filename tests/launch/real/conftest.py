"""Hosts, and SLURM on them, new for each test; a tiny job, and its numbers on one machine."""

from collections.abc import Iterator

import pytest

from tests.support import hosts as namespaces
from tests.support import slurm_cluster
from tests.support.hosts import Hosts
from tests.support.jobs import SIX_STEPS, Job, curve
from tests.support.slurm_cluster import SlurmCluster


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts, n0 and n1, with sshd."""
    if reason := namespaces.missing():
        pytest.skip(reason)
    with Hosts.up(2) as both:
        yield both


@pytest.fixture
def slurm(hosts: Hosts) -> SlurmCluster:
    """SLURM on the two hosts, with 4 CPUs on each."""
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    return SlurmCluster.up(hosts)


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of four ranks; give it a run folder of your own."""
    return Job.write(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def by_itself(job: Job) -> list:
    """The curve of `job` after SIX_STEPS, trained by `megalite train` on one machine."""
    folder = job.run_file.parent / "by-itself"
    job.run(folder, *SIX_STEPS)
    return curve(folder)
