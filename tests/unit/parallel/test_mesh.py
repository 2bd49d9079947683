"""The groups in which stages send each other hidden states take few of NCCL's thread blocks."""

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalite.parallel.mesh import MESSAGE_CTAS, ParallelMesh
from megalite.topology.axes import Layout

LIMIT = timedelta(seconds=77)


class Options:
    """As torch's ProcessGroupNCCL.Options, which a torch for CPUs lacks."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(max_ctas=-2147483648)
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def last_stage() -> Iterator[None]:
    """The last rank of eight, whose peers do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    yield
    dist.destroy_process_group()


def groups_over(layout: Layout, backend: str) -> tuple[ParallelMesh, list[dict[str, Any]]]:
    """Return the mesh on a backend, and what each of its groups was made with."""
    made: list[dict[str, Any]] = []

    def new_group(ranks: list[int], **options: Any) -> Any:
        made.append({"ranks": ranks, **options})
        return f"group {len(made)}"

    nccl = SimpleNamespace(Options=Options)
    with (
        mock.patch.multiple(dist, new_group=new_group, get_backend=lambda: backend),
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
    ):
        mesh = ParallelMesh.over_world(layout, torch.device("cpu"), collective_seconds=LIMIT.total_seconds())
    return mesh, made


@pytest.mark.usefixtures("last_stage")
def test_on_nccl_groups_of_messages_are_bounded_and_no_others() -> None:
    mesh, made = groups_over(Layout(tensor=2, pipeline=2, data=2), "nccl")
    options = {name: made[int(str(group.group).split()[1]) - 1] for name, group in mesh.groups.items()}
    assert all(each["timeout"] == LIMIT for each in made)
    bounded = {name for name, each in options.items() if each["pg_options"] is not None}
    assert bounded == {"pp_upwards", "pp_downwards"}
    for name in bounded:
        assert options[name]["pg_options"].config.max_ctas == MESSAGE_CTAS
        assert options[name]["pg_options"]._timeout == LIMIT
        assert options[name]["ranks"] == options["pp"]["ranks"] == [3, 7]
    # torch writes the name of its group into them.
    assert options["pp_upwards"]["pg_options"] is not options["pp_downwards"]["pg_options"]
    assert len({mesh.pp.group, mesh.pp_upwards.group, mesh.pp_downwards.group}) == 3


@pytest.mark.usefixtures("last_stage")
def test_another_backend_is_given_no_options() -> None:
    mesh, made = groups_over(Layout(tensor=2, pipeline=2, data=2), "gloo")
    assert made and all(each["pg_options"] is None for each in made)
    assert mesh.pp_downwards is mesh.pp and mesh.pp_upwards is not mesh.pp


@pytest.mark.usefixtures("last_stage")
def test_without_a_pipeline_no_group_is_made_for_messages() -> None:
    mesh, made = groups_over(Layout(data=8), "nccl")
    assert all(each["pg_options"] is None for each in made)
    assert mesh.pp_downwards is mesh.pp_upwards is mesh.pp
