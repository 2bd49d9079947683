"""The mesh of ranks and the process groups of its axes. No other module creates process groups."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import Store as Store

from megalite.errors import CheckpointError, LaunchError, MemoryExhausted
from megalite.launcher.control.progress import progress
from megalite.parallel.device import accelerator_id, require_distinct_accelerators
from megalite.topology.axes import COPIES, Layout
from megalite.topology.context import ContextMethod
from megalite.topology.parameters import Parameter
from megalite.topology.place import RankPlace
from megalite.topology.sharding import Part, TensorSlice, heads_held
from megalite.topology.stages import balanced_split

T = TypeVar("T")
# A rank that waits longer in a collective fails.
COLLECTIVE_SECONDS = 1800.0
# Streaming multiprocessors that NCCL may take for a message between stages: its kernels spin until the other stage is
# there, beside those that compute. NCCL_MAX_CTAS overrides it.
MESSAGE_CTAS = 4


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one process group, and this rank's index among them; a single rank needs no process group.

    role: the first axis or role of the mesh with these ranks, for messages.
    """

    ranks: tuple[int, ...]
    rank: int
    group: ProcessGroup | None = None
    role: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)


ALONE = RankGroup(ranks=(0,), rank=0)


@dataclass(frozen=True)
class ParallelMesh(RankPlace):
    """This rank's place on the mesh, and its process group along each axis and for each role.

    groups: axis or role (`RankPlace.peers`) -> this rank's group; a missing entry means this rank alone.
        "pp_upwards": the ranks of "pp" in another process group, for what a stage sends to one before it.
        "cp_ring": the ranks of "cp" in another process group, for the messages of ring attention. Without data
        parallelism gradients are reduced in the group of "cp", and a message would wait for a reduction under way.
        "pp_downwards": that for what it sends to one after it; on NCCL apart from "pp", whose collectives use all of
        the card that NCCL wants.
    sequence_parallel: outside of attention and MLP each tp rank holds a range of the positions (Korthikanti et al.,
        "Reducing Activation Recomputation in Large Transformer Models", 2022).
    context_method: how attention sees the tokens of the other ranks of `cp`.
    host: all ranks over gloo, for values in host memory. None: the default group is gloo itself. NCCL takes no host
        tensors, and waiting for it would synchronise the device.
    """

    device: torch.device
    groups: Mapping[str, RankGroup] = field(default_factory=dict, hash=False)
    sequence_parallel: bool = False
    host: ProcessGroup | None = None
    context_method: ContextMethod = "gather"

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> "ParallelMesh":
        """Return the mesh (1, 1, 1) of a single process, which needs no process group."""
        return cls(Layout(), 0, torch.device(device))

    @classmethod
    def over_world(
        cls,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        sequence_parallel: bool = False,
        context_method: ContextMethod = "gather",
        collective_seconds: float = COLLECTIVE_SECONDS,
    ) -> "ParallelMesh":
        """Create the process groups of the axes over the default process group; collective over the world.

        With three or more stages call it once in a process: torch names a group by how many its rank has made, and the
        first and the last stage make one more for their tied table, so that the groups of a second mesh never meet.
        collective_seconds: the time limit of a collective in every group, without which torch sets its own.
        Raises ValueError if the layout has another size than the world, LaunchError if two ranks share an accelerator.
        """
        device = torch.device(device)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size != layout.world_size:
            raise ValueError(f"layout {layout} needs {layout.world_size} ranks, the world has {world_size}")
        limit = timedelta(seconds=collective_seconds)
        alone = device.type == "cpu" or world_size == 1
        host = None if alone else dist.new_group(backend="gloo", timeout=limit)
        if host is not None:
            # Before the first NCCL collective, which on a shared GPU only reports "invalid usage".
            ids: list[Any] = [None] * world_size
            dist.all_gather_object(ids, accelerator_id(device), group=host)
            require_distinct_accelerators(ids)
        peers = RankPlace(layout, rank).peers
        # Before groups that only some of these ranks have: torch names a group by how many the rank has made.
        ways = ["pp_upwards"] if layout.pipeline > 1 else []
        if ways and dist.get_backend() == "nccl":
            ways.append("pp_downwards")
        messages = {way: _join(peers["pp"], rank, "pp", limit, _message_options(limit)) for way in ways}
        ring = {"cp_ring": _join(peers["cp"], rank, "cp", limit)} if layout.context > 1 else {}
        # Roles with the same ranks, and all axes of size 1, share a group: each costs connections and threads, and
        # memory on a GPU.
        joined: dict[tuple[int, ...], RankGroup] = {}
        for name, ranks in peers.items():
            if ranks not in joined:
                joined[ranks] = _join(ranks, rank, name, limit)
        groups = {name: joined[ranks] for name, ranks in peers.items()}
        groups |= {way: messages.get(way, groups["pp"]) for way in ("pp_upwards", "pp_downwards")}
        groups |= ring
        return cls(layout, rank, device, groups, sequence_parallel, host, context_method)

    @property
    def tp(self) -> RankGroup:
        """The ranks that share each layer (tensor parallelism)."""
        return self.groups.get("tp", ALONE)

    @property
    def cp(self) -> RankGroup:
        """The ranks that share each sequence (context parallelism)."""
        return self.groups.get("cp", ALONE)

    @property
    def cp_ring(self) -> RankGroup:
        """The ranks of `cp` in a group for the messages of ring attention."""
        return self.groups.get("cp_ring", ALONE)

    @property
    def ep(self) -> RankGroup:
        """The ranks among which the experts of each layer are divided (expert parallelism)."""
        return self.groups.get("ep", ALONE)

    @property
    def etp(self) -> RankGroup:
        """The ranks that share each expert (expert tensor parallelism)."""
        return self.groups.get("etp", ALONE)

    @property
    def cuts_experts(self) -> bool:
        """True if the ranks of `tp` share each expert, so that all of them route the same tokens."""
        return self.etp.size > 1

    @property
    def pp(self) -> RankGroup:
        """The stages of this rank's pipeline."""
        return self.groups.get("pp", ALONE)

    @property
    def pp_upwards(self) -> RankGroup:
        """The stages of this rank's pipeline, for what a stage sends to one before it."""
        return self.groups.get("pp_upwards", ALONE)

    @property
    def pp_downwards(self) -> RankGroup:
        """The stages of this rank's pipeline, for what a stage sends to one after it."""
        return self.groups.get("pp_downwards", ALONE)

    @property
    def batch(self) -> RankGroup:
        """The ranks that read different samples."""
        return self.groups.get("batch", ALONE)

    @property
    def dense_gradients(self) -> RankGroup:
        """The ranks with the same dense weights."""
        return self.groups.get("dense_gradients", ALONE)

    @property
    def replica(self) -> RankGroup:
        """The ranks that together hold one copy of the model."""
        return self.groups.get("replica", ALONE)

    @property
    def tied(self) -> RankGroup:
        """The first and the last stage, with the same place on all other axes; only this rank on other stages."""
        return self.groups.get("tied", ALONE)

    def tied_over(self, stages: Sequence[int]) -> RankGroup:
        """Return the ranks that hold a weight of these stages, all of them or the first and the last one.

        On this rank's place of all other axes.
        """
        return self.pp if len(stages) == self.pp.size else self.tied

    def cut_over(self, parameter: Parameter) -> RankGroup:
        """Return the ranks over which a parameter is cut."""
        return self.groups.get(parameter.spec.axis, ALONE)

    def copies(self, parameter: Parameter) -> RankGroup:
        """Return the ranks with the same shard of a parameter, which sum its gradient."""
        return self.groups.get(COPIES[parameter.spec.axis], ALONE)

    def parts_of(self, parameter: Parameter, tensor: Tensor) -> Iterator[tuple[Part, TensorSlice, Tensor]]:
        """Yield each part of a parameter with this rank's slice and, as a view, the slice's rows of `tensor`.

        tensor: this rank's shard of the parameter, or a tensor with as many rows.
        """
        row = 0
        for part, region in self.slices(parameter):
            yield part, region, tensor[row : row + region.shape[0]]
            row += region.shape[0]

    def local(self, size: int) -> int:
        """Return this rank's part of a size that may be sharded over tp at any index, such as intermediate features."""
        return len(balanced_split(size, self.tp.size)[self.tp.rank])

    def local_heads(self, heads: int) -> int:
        """Return the number of heads on this rank; with fewer heads than ranks, neighbours share a head.

        Raises ValueError where neither number divides the other.
        """
        return len(heads_held(heads, self.tp.rank, self.tp.size))

    @property
    def splits_sequence(self) -> bool:
        """True if hidden states are [B, S / tp, H] outside of attention and MLP."""
        return self.sequence_parallel and self.tp.size > 1

    def sequence_range(self, length: int) -> range:
        """Return the positions, of range(length), that this rank holds outside of attention and MLP."""
        if not self.splits_sequence:
            return range(length)
        positions, rest = divmod(length, self.tp.size)
        if rest:
            raise ValueError(
                f"a sequence of {length} is not divisible by {self.tp.size} tensor parallel ranks"
            )
        return range(self.tp.rank * positions, (self.tp.rank + 1) * positions)

    def barrier(self) -> None:
        if self.layout.world_size > 1:
            with progress.collective("barrier", "world"):
                dist.barrier(group=self.host)

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Return the picklable values of all ranks, in rank order, on rank 0; None on other ranks."""
        if self.layout.world_size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.layout.world_size if self.rank == 0 else None
        with progress.collective("gather", "world"):
            dist.gather_object(value, gathered, group=self.host)
        return gathered

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's picklable value on every rank."""
        if self.layout.world_size == 1:
            return value
        values = [value]
        with progress.collective("broadcast", "world"):
            dist.broadcast_object_list(values, group=self.host)
        return values[0]

    def sum_over_world(self, values: list[float]) -> list[float]:
        """Return the elementwise float64 sums over all ranks of numbers in host memory."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.layout.world_size > 1:
            with progress.collective("all_reduce", "world"):
                dist.all_reduce(total, group=self.host)
        return total.tolist()

    def max_over_world(self, value: float) -> float:
        """Return the maximum over all ranks, on every rank."""
        largest = torch.tensor(value, dtype=torch.float64)
        if self.layout.world_size > 1:
            with progress.collective("all_reduce", "world"):
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.host)
        return float(largest)

    def reduce_over_world(self, values: Tensor) -> Tensor:
        """Sum a tensor on the mesh's device over all ranks, in place, without a device synchronisation."""
        if self.layout.world_size > 1:
            with progress.collective("all_reduce", "world"):
                dist.all_reduce(values)
        return values


def all_or_none(mesh: ParallelMesh, action: Callable[[], T], explain: Callable[[Exception], str]) -> T:
    """Run `action` on every rank; if it fails on any rank, raise the same CheckpointError on all. Collective.

    MemoryExhausted instead where that rank's device has no memory left, which is no fault of the checkpoint.
    explain: exception of `action` -> message of the error; the first failed rank's message is raised.
    """
    failure, cause, result = None, None, None
    try:
        result = action()
    # Every exception: otherwise the other ranks would wait forever.
    except Exception as error:
        cause = error
        kind = MemoryExhausted if isinstance(error, torch.OutOfMemoryError) else CheckpointError
        failure = kind(explain(error))
    failures = [each for each in mesh.gather_objects(failure) or [] if each is not None]
    first = mesh.broadcast_object(failures[0] if failures else None)
    if first is not None:
        raise first from cause
    return result  # type: ignore[return-value]


def connect(
    rank: int,
    world_size: int,
    *,
    device: torch.device,
    rendezvous: str = "env://",
    store: Store | None = None,
    timeout_seconds: float = COLLECTIVE_SECONDS,
) -> None:
    """Create the default process group with torch's default backend of the device: gloo on CPUs, NCCL on GPUs.

    store: where the ranks exchange their addresses (`serve_store`, `reach_store`). Without one, rendezvous is torch's
    `init_method`: env:// (MASTER_ADDR and MASTER_PORT), or file:///a/path on one node.
    Raises LaunchError if this torch was built without that backend.
    """
    backend = backend_of(device)
    if not backend:
        raise LaunchError(
            f"this torch was built without a collective library for {device.type} devices; install a build that has "
            "one, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    dist.init_process_group(
        backend,
        init_method=rendezvous if store is None else None,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def serve_store(address: str, timeout_seconds: float) -> tuple[Store, int]:
    """Open a store at an address of this host, for the ranks of one start of a job; return it and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=1024)
    port: int = listener.getsockname()[1]
    timeout = timedelta(seconds=timeout_seconds)
    # The store takes over the socket: torch's own would listen on all interfaces.
    served = dist.TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return served, port


def reach_store(address: str, port: int, timeout_seconds: float) -> Store:
    """Return the store that another rank serves."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)


def disconnect() -> None:
    """Destroy the default process group and all groups made from it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _message_options(limit: timedelta) -> Any:
    """Return NCCL's options of one group in which stages send each other hidden states; None on another backend."""
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MESSAGE_CTAS
    options._timeout = limit  # torch warns of another limit than that of new_group, which it takes
    return options


def _join(ranks: tuple[int, ...], rank: int, role: str, limit: timedelta, options: Any = None) -> RankGroup:
    # Only the members create the group, so the cost does not grow with the world.
    group = dist.new_group(list(ranks), timeout=limit, pg_options=options, use_local_synchronization=True)
    return RankGroup(ranks, ranks.index(rank), group, role)


def backend_of(device: torch.device) -> str:
    """Return the name of torch's default backend for a device; "" if this torch was built without the backend."""
    name = dist.get_default_backend_for_device(device)
    return str(name) if dist.is_backend_available(name) else ""
