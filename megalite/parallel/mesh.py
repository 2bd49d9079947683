"""The mesh of ranks and the process group of each of its axes. The only creator of process groups."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup

from megalite.errors import LaunchError
from megalite.parallel.device import accelerator_id, require_distinct_accelerators
from megalite.topology.axes import Coordinates, Layout
from megalite.topology.sharding import heads_held
from megalite.topology.stages import balanced_split


@dataclass(frozen=True)
class Axis:
    """The ranks that this rank shares an axis with; a size of 1 communicates nothing, and needs no group."""

    ranks: tuple[int, ...]
    rank: int
    group: ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


ALONE = Axis(ranks=(0,), rank=0)


@dataclass(frozen=True)
class ParallelMesh:
    """This rank's place on the mesh and its peers on every axis.

    tp, dp, pp: the axes. replica: the tp x pp ranks that hold one copy of the model together.
    ends: the first and the last stage with the same dp and tp, for tied embeddings; alone on the stages between.
    sequence_parallel: outside of attention and MLP each rank of tp holds a run of the positions (Korthikanti et al.,
    "Reducing activation recomputation in large Transformer models", 2022).
    host: the whole world over gloo, for numbers and objects that lie in host memory; None where the default group
    takes these. On an accelerator the default group refuses them, and a wait for it would drain the device.
    """

    layout: Layout
    rank: int
    device: torch.device
    tp: Axis = ALONE
    dp: Axis = ALONE
    pp: Axis = ALONE
    replica: Axis = ALONE
    ends: Axis = ALONE
    sequence_parallel: bool = False
    host: ProcessGroup | None = None

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> "ParallelMesh":
        """One process as the mesh (1, 1, 1); needs no process group."""
        return cls(Layout(), 0, torch.device(device))

    @classmethod
    def over_world(
        cls, layout: Layout, device: torch.device | str = "cpu", *, sequence_parallel: bool = False
    ) -> "ParallelMesh":
        """Lay the axes over the ranks of the default process group; collective over the world.

        Raises ValueError when the layout's size is not the world's, LaunchError where two ranks share an accelerator.
        """
        device = torch.device(device)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size != layout.world_size:
            raise ValueError(f"layout {layout} needs {layout.world_size} ranks, the world has {world_size}")
        host = None if device.type == "cpu" or world_size == 1 else dist.new_group(backend="gloo")
        if host is not None:
            # Before the first collective on the devices: NCCL says of a shared card that a call was invalid.
            cards: list[Any] = [None] * world_size
            dist.all_gather_object(cards, accelerator_id(device), group=host)
            require_distinct_accelerators(cards)
        pp_ranks = layout.peers(rank, "pp")
        pp = _join(pp_ranks, rank)
        ends_ranks = (pp_ranks[0], pp_ranks[-1])
        ends = pp if len(pp_ranks) <= 2 else _join(ends_ranks if rank in ends_ranks else (rank,), rank)
        return cls(
            layout,
            rank,
            device,
            tp=_join(layout.peers(rank, "tp"), rank),
            dp=_join(layout.peers(rank, "dp"), rank),
            pp=pp,
            replica=_join(layout.peers(rank, "tp", "pp"), rank),
            ends=ends,
            sequence_parallel=sequence_parallel,
            host=host,
        )

    @property
    def at(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    def local(self, size: int) -> int:
        """This rank's part of a size that is cut over tp anywhere: intermediate features."""
        return len(balanced_split(size, self.tp.size)[self.tp.rank])

    def local_heads(self, heads: int) -> int:
        """This rank's part of whole heads, at least one: neighbours share one where there are fewer than ranks.

        Raises ValueError where neither number divides the other.
        """
        return len(heads_held(heads, self.tp.rank, self.tp.size))

    @property
    def splits_sequence(self) -> bool:
        """Whether hidden states [B, S / tp, H] stand outside of attention and MLP."""
        return self.sequence_parallel and self.tp.size > 1

    def sequence_range(self, length: int) -> range:
        """The positions, of `length`, that this rank holds outside of attention and MLP."""
        if not self.splits_sequence:
            return range(length)
        held, rest = divmod(length, self.tp.size)
        if rest:
            raise ValueError(
                f"a sequence of {length} is not divisible by {self.tp.size} tensor parallel ranks"
            )
        return range(self.tp.rank * held, (self.tp.rank + 1) * held)

    def barrier(self) -> None:
        if self.layout.world_size > 1:
            dist.barrier(group=self.host)

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Every rank's (picklable) value, in rank order, on rank 0; None elsewhere."""
        if self.layout.world_size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.layout.world_size if self.rank == 0 else None
        dist.gather_object(value, gathered, group=self.host)
        return gathered

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.layout.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.host)
        return box[0]

    def sum_over_world(self, values: list[float]) -> list[float]:
        """Elementwise float64 sums over all ranks of numbers that the host has."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.layout.world_size > 1:
            dist.all_reduce(total, group=self.host)
        return total.tolist()

    def max_over_world(self, value: float) -> float:
        """The largest of all ranks' values, on every rank."""
        largest = torch.tensor(value, dtype=torch.float64)
        if self.layout.world_size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.host)
        return float(largest)

    def reduce_over_world(self, values: Tensor) -> Tensor:
        """Sum a tensor on the mesh's device over all ranks, in place; the host does not wait for it."""
        if self.layout.world_size > 1:
            dist.all_reduce(values)
        return values


def connect(
    rank: int,
    world_size: int,
    *,
    device: torch.device,
    rendezvous: str = "env://",
    timeout_seconds: float = 1800,
) -> None:
    """Join the default process group, over torch's own backend for the device: gloo on CPUs, NCCL on GPUs.

    rendezvous: where ranks meet, in torch's words: MASTER_ADDR and MASTER_PORT, or file:///a/path on one node.
    Raises LaunchError where this torch was built without that backend.
    """
    backend = backend_of(device)
    if not backend:
        raise LaunchError(
            f"this torch was built without a collective library for {device.type} devices; install a build that has "
            "one, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    dist.init_process_group(
        backend,
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def disconnect() -> None:
    """Leave the default process group and every group made from it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(ranks: tuple[int, ...], rank: int) -> Axis:
    # Only the members take part: group creation does not grow with the world.
    return Axis(ranks, ranks.index(rank), dist.new_group(list(ranks), use_local_synchronization=True))


def backend_of(device: torch.device) -> str:
    """Return torch's name of the collective library for a device; empty where this torch was built without it."""
    name = dist.get_default_backend_for_device(device)
    return str(name) if dist.is_backend_available(name) else ""
