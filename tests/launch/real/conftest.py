"""Hosts, and SLURM on them, new for each test."""

from collections.abc import Iterator

import pytest

from tests.support import hosts as namespaces
from tests.support import slurm_cluster
from tests.support.hosts import Hosts
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
