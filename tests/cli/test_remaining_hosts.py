"""A restart after a host was lost: a spare host takes over, or the layout shrinks if that is allowed."""

from dataclasses import replace
from functools import partial

import pytest

from megalite.cli.remaining_hosts import Restart, remaining_hosts
from megalite.config.smaller_layout import smaller_layout
from megalite.errors import LaunchError
from megalite.launcher.hosts.host_report import HostFinding, HostReport
from megalite.launcher.hosts.hostfile import Host
from megalite.launcher.hosts.job_hosts import Hosts
from megalite.launcher.hosts.preflight import Preflight

RUN = """
[model]
preset = "tiny"
[data]
source = "stdlib"
[training]
steps = 4
sequence_length = 32
global_batch_size = 8
micro_batch_size = 2
[parallel]
tensor = 2
data = 2
"""


class Cluster:
    """Hosts of two slots each, some of which do not answer; it remembers which were asked."""

    def __init__(self, *names: str, dead: str = ""):
        self.found = Hosts("hostfile", "the hostfile h", tuple(Host(name, (0, 1)) for name in names))
        self.dead, self.asked, self.said = dead.split(), [], []

    def ask(self, found: Hosts) -> Preflight:
        names = [host.name for host in found.hosts]
        self.asked.append(names)
        findings = [
            HostFinding(name, "reachable", "cannot be reached") for name in names if name in self.dead
        ]
        return Preflight([HostReport(name, 2) for name in names], findings)

    def restart(self, folder, ranks: int = 4, allow_fewer: bool = False) -> Restart:
        (folder / "run.toml").write_text(RUN)
        shrink = partial(smaller_layout, folder / "run.toml", [], ranks) if allow_fewer else None
        return remaining_hosts(self.found, ranks, self.ask, shrink, self.said.append)


def test_hosts_that_all_pass_run_the_same_layout(tmp_path):
    cluster = Cluster("n0", "n1")
    assert cluster.restart(tmp_path) == Restart(cluster.found, 4)
    assert cluster.said == [] and len(cluster.asked) == 1


def test_a_spare_host_takes_over_without_a_flag(tmp_path):
    cluster = Cluster("n0", "n1", "n2", dead="n0")
    restart = cluster.restart(tmp_path)
    assert [host.name for host in restart.hosts.hosts] == ["n1", "n2"]
    assert (restart.ranks, restart.flags) == (4, ())
    assert cluster.asked == [["n0", "n1", "n2"], ["n1", "n2"]]  # the second time among themselves
    assert cluster.said == ["n0 left out: the other hosts have 4 slots for 4 ranks"]


def test_too_few_slots_are_an_error_unless_fewer_are_allowed(tmp_path):
    with pytest.raises(LaunchError, match="n1 did not pass the preflight"):
        Cluster("n0", "n1", dead="n1").restart(tmp_path)
    cluster = Cluster("n0", "n1", dead="n1")
    restart = cluster.restart(tmp_path, allow_fewer=True)
    assert (
        restart.ranks == 2 and "--parallel.data=1" in restart.flags and "--parallel.tensor=2" in restart.flags
    )
    assert cluster.said == [
        "n1 left out: going on with 2 of 4 ranks, tensor 2 x pipeline 1 x data 1, 4 micro batches of 2, "
        "the same global batch of 8"
    ]


def test_no_host_left_is_an_error_in_any_case(tmp_path):
    with pytest.raises(LaunchError, match="n0, n1 did not pass the preflight"):
        Cluster("n0", "n1", dead="n0 n1").restart(tmp_path, allow_fewer=True)


def test_hosts_that_fail_among_themselves_are_an_error(tmp_path):
    """n0 was the one that the others were compared with; without it n2 turns out to differ from n1."""
    cluster = Cluster("n0", "n1", "n2", dead="n0")
    ask = cluster.ask

    def differing(found: Hosts) -> Preflight:
        result = ask(found)
        if found.hosts[0].name == "n1":
            return replace(result, findings=[HostFinding("n2", "torch", "torch is 2.12.0")])
        return result

    cluster.ask = differing
    with pytest.raises(LaunchError, match="n2 did not pass"):
        cluster.restart(tmp_path)
