"""The time limit of a collective holds in every group: a rank whose peer never comes fails and names the setting."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.launcher.control.failures import FailureFolder
from megalite.launcher.control.progress import progress
from megalite.launcher.rank.detect import local_rank_infos
from megalite.parallel.collectives import all_reduce
from megalite.parallel.device import local_device
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from tests.support.waiting import PATIENCE

LAYOUT = Layout(tensor=2, pipeline=2, data=2)
SECONDS = 3.0
# The rank that waits -> its collective; each in another group, whose other ranks never join.
WAITING: dict[int, Callable[[ParallelMesh], object]] = {
    0: lambda mesh: mesh.gather_objects("here"),
    1: lambda mesh: all_reduce(torch.zeros(2, device=mesh.device), mesh.tp),
    2: lambda mesh: all_reduce(torch.zeros(2, device=mesh.device), mesh.dense_gradients),
    4: lambda mesh: dist.irecv(torch.zeros(2, device=mesh.device), 0, mesh.pp_upwards.group).wait(),
    7: lambda mesh: dist.irecv(torch.zeros(2, device=mesh.device), 3, mesh.pp.group).wait(),
}


def waiting_ranks(pool: str) -> set[int]:
    """On CPUs the host's group is the default one, which has the limit of the pool."""
    return {*WAITING} if pool == "devices" else {*WAITING} - {0}


def wait_alone(pool: str, folder: Path) -> tuple[float, str] | None:
    """Return the seconds that this rank's collective waited, and the headline of its failure report."""
    rank = dist.get_rank()
    device = local_device(rank, dist.get_world_size())
    mesh = ParallelMesh.over_world(LAYOUT, device, collective_seconds=SECONDS)
    mesh.barrier()
    store = dist.distributed_c10d._get_default_store()
    ends = [f"{each} ended" for each in waiting_ranks(pool)]
    if f"{rank} ended" not in ends:
        store.wait(ends, timedelta(seconds=PATIENCE))
        return None
    progress.restart()
    progress.collective("all_reduce", "world")
    began = time.monotonic()
    try:
        WAITING[rank](mesh)
    except RuntimeError as error:
        waited = time.monotonic() - began
        info = local_rank_infos(LAYOUT.world_size, folder)[rank]
        return waited, FailureFolder(folder, LAYOUT, "job").of_exception(info, error).headline
    finally:
        store.set(f"{rank} ended", "")
        # Leaving ends the others' collectives too.
        store.wait(ends, timedelta(seconds=PATIENCE))
    return 0.0, "the collective ended"


@pytest.mark.extended  # three seconds
@pytest.mark.parametrize("pool", ["ranks", "devices"])
def test_a_rank_whose_peer_never_joins_fails_in_time_and_names_the_setting(
    request: pytest.FixtureRequest, tmp_path: Path, pool: str
) -> None:
    results = request.getfixturevalue(pool).run(wait_alone, LAYOUT.world_size, pool=pool, folder=tmp_path)
    for rank in waiting_ranks(pool):
        waited, headline = results[rank]
        # Late on a busy machine, but far below the limits of torch: 600 and 1800 s.
        assert SECONDS * 0.9 <= waited < PATIENCE, (rank, waited, headline)
        assert "did not join a collective within launch.collective_seconds" in headline, (rank, headline)
        assert "Timed out waiting 3000ms" in headline, (rank, headline)


def limits_of_groups(seconds: float) -> set[float]:
    """Return the limits of all groups of a rank but the default one, which the pool made."""
    ParallelMesh.over_world(LAYOUT, collective_seconds=seconds)
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    assert len(groups) >= len(LAYOUT.sizes)
    return {_limit(group) for group in groups}


def _limit(group: dist.ProcessGroup) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_every_group_of_the_mesh_has_the_limit(ranks) -> None:
    assert ranks.run(limits_of_groups, LAYOUT.world_size, seconds=77.0) == [{77.0}] * LAYOUT.world_size
