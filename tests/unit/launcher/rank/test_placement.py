"""Ranks on cores by NUMA node, and tensor-parallel ranks that are on different hosts."""

import os
from collections.abc import Sequence

import pytest

from megalite.launcher.rank import placement
from megalite.launcher.rank.detect import local_rank_infos
from megalite.launcher.rank.placement import (
    bind_cores,
    cores_of_rank,
    groups_across_hosts,
    nodes_of_gpus,
    numa_nodes,
    placement_warning,
)
from megalite.topology.axes import Layout

ONE, TWO = {0: [0, 1, 2, 3, 4, 5, 6, 7]}, {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}


@pytest.mark.parametrize(
    ("ranks", "nodes", "near", "expected"),
    [
        (2, ONE, [], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (3, ONE, [], [(0, 1), (2, 3, 4), (5, 6, 7)]),
        (1, TWO, [], [(0, 1, 2, 3, 4, 5, 6, 7)]),
        (2, TWO, [], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (4, TWO, [], [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (3, TWO, [], [(0, 1), (2, 3), (4, 5, 6, 7)]),
        # GPUs 0 and 2 on the second node, 1 and 3 on the first.
        (4, TWO, [1, 0, 1, 0], [(4, 5), (0, 1), (6, 7), (2, 3)]),
        (2, TWO, [1, 1], [(4, 5), (6, 7)]),
        # All GPUs on a node with fewer cores than ranks, and more ranks than cores.
        (5, TWO, [0] * 5, [()] * 5),
        (9, ONE, [], [()] * 9),
    ],
)
def test_ranks_get_disjoint_cores_of_one_node(ranks, nodes, near, expected):
    assert [cores_of_rank(rank, ranks, nodes, near) for rank in range(ranks)] == expected


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight hardware threads of four cores on two NUMA nodes, not bound; the list gets the cores that are chosen."""
    for node, cores in {0: "0-1,4-5", 1: "2-3,6-7"}.items():
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(cores + "\n")
    for core in range(8):
        (tmp_path / "cpu" / f"cpu{core}" / "topology").mkdir(parents=True)
        siblings = f"{core % 4},{core % 4 + 4}\n"
        (tmp_path / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(siblings)
    bound: list[Sequence[int]] = []
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(placement.os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    monkeypatch.setattr(placement.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(placement, "available_cores", lambda: 8)
    return tmp_path, bound


def test_a_rank_is_bound_to_whole_cores_of_its_node(machine, tmp_path):
    system, bound = machine
    assert numa_nodes(system) == {0: [0, 4, 1, 5], 1: [2, 6, 3, 7]}
    infos = local_rank_infos(4, tmp_path / "store")
    for info in infos:
        assert bind_cores(info, {}, "auto", system, tmp_path / "no gpus") == tuple(bound[-1])
    assert bound == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_nothing_is_bound_where_it_would_not_help_or_is_not_ours(machine, tmp_path, monkeypatch):
    system, bound = machine
    info = local_rank_infos(4, tmp_path / "store")[0]
    assert bind_cores(info, {}, False, system) == ()
    assert bind_cores(info, {}, "auto", tmp_path / "unknown") == ()
    many = local_rank_infos(9, tmp_path / "store")[0]
    assert bind_cores(many, {}, True, system) == ()
    monkeypatch.setattr(placement, "available_cores", lambda: 4)  # a quota of the container
    assert bind_cores(info, {}, True, system) == ()
    monkeypatch.setattr(placement, "available_cores", lambda: 8)
    (system / "node" / "node1" / "cpulist").write_text("\n")  # memory without cores: one node that counts
    (system / "node" / "node0" / "cpulist").write_text("0-7\n")
    assert bind_cores(info, {}, "auto", system, tmp_path / "no gpus") == () and not bound
    assert len(bind_cores(info, {}, True, system, tmp_path / "no gpus")) == 2
    bound.clear()
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: {0, 1})  # the launcher's choice
    assert bind_cores(local_rank_infos(2, tmp_path)[0], {}, True, system) == () and not bound


def test_gpus_whose_node_is_unknown_bind_nothing(tmp_path):
    assert nodes_of_gpus(tmp_path / "none") == []
    (tmp_path / "gpus" / "ffff:ff:1f.0").mkdir(parents=True)  # no such device
    assert nodes_of_gpus(tmp_path / "gpus") == []


def test_a_process_of_this_machine_is_really_bound(tmp_path):
    ranks = len(os.sched_getaffinity(0))
    info = local_rank_infos(ranks, tmp_path / "store")[ranks - 1]
    child = os.fork()
    if child == 0:
        cores = bind_cores(info, {}, True)
        os._exit(int(bool(cores) and os.sched_getaffinity(0) != set(cores)))
    assert os.waitpid(child, 0)[1] == 0


BLOCKS, DEALT = ["n0", "n0", "n1", "n1"], ["n0", "n1", "n0", "n1"]


def test_tensor_groups_on_one_host_are_silent():
    assert placement_warning(Layout(pipeline=2, tensor=2), BLOCKS) == ""
    assert groups_across_hosts(Layout(data=4), "tp", DEALT) == []


def test_ranks_dealt_out_round_robin_are_said_with_the_launchers_option():
    text = placement_warning(Layout(pipeline=2, tensor=2), DEALT)
    assert text.startswith(
        "2 of 2 tensor-parallel groups span hosts (ranks 0 on n0, 1 on n1), so that every layer"
    )
    assert "--map-by slot" in text and "--distribution=block" in text


@pytest.mark.parametrize(
    ("layout", "hosts", "remedy"),
    [
        (Layout(tensor=4), BLOCKS, "use parallel.tensor = 2, or start a multiple of 4 ranks on each host"),
        (Layout(tensor=4), ["n0", "n1", "n2", "n3"], "; start a multiple of 4 ranks on each host"),
        (Layout(data=2, tensor=3), ["n0"] * 2 + ["n1"] * 4, "; start a multiple of 3 ranks on each host"),
        (Layout(data=3, tensor=2), ["n0"] * 3 + ["n1"] * 3, "; start a multiple of 2 ranks on each host"),
    ],
)
def test_a_tensor_axis_that_does_not_fit_a_host_is_said_with_the_nearest_that_does(layout, hosts, remedy):
    text = placement_warning(layout, hosts)
    assert text.endswith(remedy), text
    assert "span hosts" in text


def test_ranks_that_share_a_sequence_are_kept_on_one_host_where_they_fit():
    """Ranks that cannot be on one host are no mistake: a long sequence is cut over hosts on purpose."""
    assert placement_warning(Layout(context=2, data=2), BLOCKS) == ""
    assert placement_warning(Layout(context=4), BLOCKS) == ""
    assert placement_warning(Layout(context=2, tensor=2), BLOCKS) == ""
    dealt = placement_warning(Layout(context=2, data=2), DEALT)
    assert dealt.startswith(
        "2 of 2 context-parallel groups span hosts (ranks 0 on n0, 1 on n1), so that every layer"
    )
    assert "--map-by slot" in dealt
    uneven = placement_warning(Layout(context=4, data=2), ["n0"] * 6 + ["n1"] * 2)
    assert uneven.endswith("use parallel.context = 2, or start a multiple of 4 ranks on each host")
    both = placement_warning(Layout(context=2, tensor=2, data=2), ["n0"] * 6 + ["n1"] * 2)
    assert both.startswith("2 of 4 context-parallel groups") and both.endswith(
        "; start a multiple of 4 ranks on each host"
    )


def test_ranks_that_divide_experts_are_kept_on_one_host_where_they_fit():
    """Two hosts of four ranks: two expert ranks, whole or cut over tensor ranks, are neighbours on one of them."""
    hosts, dealt = ["n0"] * 4 + ["n1"] * 4, ["n0", "n1"] * 4
    assert placement_warning(Layout(data=8, expert=4), hosts, "words") == ""
    assert placement_warning(Layout(data=4, tensor=2, expert=2), hosts) == ""
    assert placement_warning(Layout(data=8, expert=8), hosts) == "", "they have no room on one host"
    text = placement_warning(Layout(data=8, expert=4), dealt, "experts: 3 MiB a token and step")
    assert text.startswith(
        "2 of 2 expert-parallel groups span hosts (ranks 0 on n0, 1 on n1, 2 on n0, 3 on n1), so that every layer waits"
        " for the network (experts: 3 MiB a token and step); give neighbouring ranks"
    )
    uneven = placement_warning(Layout(data=4, tensor=2, expert=2), ["n0"] * 6 + ["n1"] * 2)
    assert uneven.startswith("2 of 4 expert-parallel groups") and "parallel.expert" not in uneven
    assert uneven.endswith("; start a multiple of 4 ranks on each host")
    assert placement_warning(Layout(data=8, expert=4), ["n0"] * 6 + ["n1"] * 2).endswith(
        "use parallel.expert = 2, or start a multiple of 4 ranks on each host"
    )
