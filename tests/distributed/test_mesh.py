"""Groups of the mesh, one an axis and one a role, hold the ranks that the topology names; collectives reach them."""

import pytest
import torch
import torch.distributed as dist

from megalite.errors import CheckpointError, MegaliteError, MemoryExhausted
from megalite.launcher.control.progress import progress
from megalite.parallel.collectives import all_reduce
from megalite.parallel.mesh import ParallelMesh, all_or_none
from megalite.topology.axes import AXES, ROLES, Layout


def groups_on_rank(layout: Layout) -> dict[str, tuple]:
    mesh = ParallelMesh.over_world(layout)
    seen = {}
    for name, group in mesh.groups.items():
        ranks = torch.zeros(layout.world_size)
        ranks[mesh.rank] = 1
        dist.all_reduce(ranks, group=group.group)
        seen[name] = (group.ranks, group.rank, tuple(ranks.nonzero().flatten().tolist()))
    made = {id(group.group) for name, group in mesh.groups.items() if name not in ("pp_upwards", "cp_ring")}
    assert len(made) == len({group.ranks for group in mesh.groups.values()}), "a group is made twice"
    seen["collectives"] = []
    for group in (mesh.tp, mesh.dense_gradients, mesh.tied):
        progress.restart()
        all_reduce(torch.zeros(1), group)
        seen["collectives"].append(progress.last_collective)
    seen["gathered"] = mesh.gather_objects(str(mesh.at))
    seen["broadcast"] = mesh.broadcast_object(mesh.rank + 100)
    return seen


@pytest.mark.parametrize(
    "layout", [Layout(2, 2, 2), Layout(4, 1, 2), Layout(1, 3, 1), Layout(1, 1, 2, 2)], ids=str
)
def test_groups_join_the_ranks_of_the_topology(ranks, layout):
    results = ranks.run(groups_on_rank, world_size=layout.world_size, layout=layout)
    for rank, seen in enumerate(results):
        expected = {axis: layout.peers(rank, axis) for axis in AXES}
        expected |= {role: layout.peers(rank, *axes) for role, axes in ROLES.items()}
        expected |= layout.expert_peers(rank)
        stages = expected["pp"]
        if layout.context > 1:
            expected["cp_ring"] = expected["cp"]
        expected["pp_upwards"] = expected["pp_downwards"] = stages
        expected["tied"] = (
            stages
            if len(stages) < 3
            else (stages[0], stages[-1])
            if rank in (stages[0], stages[-1])
            else (rank,)
        )
        assert set(seen) == {*expected, "gathered", "broadcast", "collectives"}
        for name, members in expected.items():
            assert seen[name] == (members, members.index(rank), members), name
        assert seen["broadcast"] == 100
        # A group is named by the axis where an axis has the same ranks as the role.
        tied = "pp" if len(stages) == 2 else "tied"
        dense = "dp" if layout.context == 1 else "cp"
        reduced = {"tp": layout.tensor, dense: layout.data * layout.context, tied: len(expected["tied"])}
        assert seen["collectives"] == [
            f"all_reduce over {name}" * (size > 1) for name, size in reduced.items()
        ]
    assert results[0]["gathered"] == [str(layout.coordinates(rank)) for rank in range(layout.world_size)]


def wrong_world_on_rank() -> str:
    try:
        ParallelMesh.over_world(Layout(tensor=4))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_layout_of_another_size_is_refused(ranks):
    for message in ranks.run(wrong_world_on_rank, world_size=2):
        assert "needs 4 ranks, the world has 2" in message


def positions_on_rank(sequence_parallel: bool) -> tuple[range, str]:
    mesh = ParallelMesh.over_world(Layout(tensor=2, data=2), sequence_parallel=sequence_parallel)
    try:
        return mesh.sequence_range(6), str(mesh.sequence_range(7))
    except ValueError as error:
        return mesh.sequence_range(6), str(error)


def test_a_rank_holds_a_run_of_the_positions(ranks):
    whole = ranks.run(positions_on_rank, world_size=4, sequence_parallel=False)
    assert whole == [(range(6), "range(0, 7)")] * 4
    refused = "a sequence of 7 is not divisible by 2 tensor parallel ranks"
    split = ranks.run(positions_on_rank, world_size=4, sequence_parallel=True)
    assert split == [(range(3), refused), (range(3, 6), refused)] * 2


def failed_together(error: Exception) -> tuple[type[MegaliteError], str, str]:
    """Return what a rank of two raises where the other one, or itself, fails."""
    mesh = ParallelMesh.over_world(Layout(tensor=2))

    def action() -> None:
        if mesh.rank == 1:
            raise error

    with pytest.raises(MegaliteError) as raised:
        all_or_none(mesh, action, lambda error: f"rank 1: {error}")
    return raised.type, str(raised.value), repr(raised.value.__cause__)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(torch.OutOfMemoryError("full"), MemoryExhausted), (OSError("gone"), CheckpointError)],
    ids=["memory", "file"],
)
def test_what_fails_on_one_rank_fails_alike_on_all(ranks, error, kind):
    other, failed = ranks.run(failed_together, world_size=2, error=error)
    assert other == (kind, f"rank 1: {error}", "None")
    assert failed == (kind, f"rank 1: {error}", repr(error))
