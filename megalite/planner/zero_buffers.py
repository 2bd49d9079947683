"""What DeepSpeed keeps beside the states that ZeRO partitions: gradients on their way, its buckets, gathered weights.

Read off DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py, stage3.py and partitioned_param_coordinator.py, with the
settings that train/optimizer/deepspeed.py hands it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod

from megalite.config.deepspeed.zero_defaults import with_zero_defaults
from megalite.planner.arriving_gradients import table_values, trains
from megalite.planner.planned_run import PlannedRun
from megalite.planner.stage_parameters import ValueCounts
from megalite.topology.axes import Layout
from megalite.topology.collective_sizes import COLLECTIVE_BYTES
from megalite.topology.experts import EXPERT_AXIS
from megalite.topology.parameters import EMBEDDING, HEAD, Parameter, layer_parameters, stage_parameters
from megalite.topology.place import RankPlace
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit

# DeepSpeed's defaults of ZeRO 3, in values.
_PREFETCHED, _MOST_LIVE = 50_000_000, 1_000_000_000


@dataclass(frozen=True)
class ZeroBuffers:
    """Bytes on a rank; all zero without DeepSpeed.

    gathered: of weights, from their forward to their backward. prefetched: of the buffer that weights are gathered in,
    during a forward, until the last of them is used. table: of the gathered embedding,
    until the end of a backward. first, later: of gradients beside the rank's share, at the end of the first backward
    and of each later one. bucket: of gradients that are reduced, with the copy that is. update: of copies of the share
    while weights are updated. buffers: that stay. host: that stay beside an optimizer state on the host.
    """

    gathered: float = 0.0
    prefetched: float = 0.0
    table: float = 0.0
    first: float = 0.0
    later: float = 0.0
    bucket: float = 0.0
    update: float = 0.0
    buffers: float = 0.0
    host: float = 0.0


NO_BUFFERS = ZeroBuffers()
"""The buffers of a rank without DeepSpeed."""


def zero_buffers(run: PlannedRun, stage: int, counts: ValueCounts) -> ZeroBuffers:
    """Return what DeepSpeed keeps on the rank of a stage that needs the most. counts: of the stage."""
    if not run.zero_stage:
        return NO_BUFFERS
    size, largest = run.gradient_bytes, largest_values(run, stage)
    share = size * counts.trained / run.copies
    offloads = "offload_optimizer" in run.offload
    # Gradients of low-precision weights are summed in fp32 in one buffer, which the update reads (`flat_partition`).
    flat = run.weight_bytes < size
    if partitioned_stage(run) == 1:
        return ZeroBuffers(
            update=share,
            buffers=run.weight_bytes * largest * offloads,
            host=(run.weight_bytes * largest + (size + run.weight_bytes) * counts.trained / run.copies)
            * offloads,
        )
    asked = with_zero_defaults({"stage": run.zero_stage, **run.zero}, numel=counts.trained, data=run.copies)
    filled = size * max(largest, min(int(asked["reduce_bucket_size"]), counts.trained))
    # One gradient alone, or its part for one rank, is reduced where it lies.
    bucket = filled * (2 if filled > size * largest else 1)
    if run.zero_stage == 3:
        live = min(counts.weights, int(asked.get("stage3_max_live_parameters", _MOST_LIVE)))
        ahead = int(asked.get("stage3_prefetch_bucket_size", _PREFETCHED))
        # The embedding is waited for before the others are asked for.
        others = live - min(live, table_values(run))
        table = run.weight_bytes * table_values(run) * trains(run, EMBEDDING)
        return ZeroBuffers(
            run.weight_bytes * live,
            run.weight_bytes * min(others, ahead),
            table,
            # The gradients of low precision, and what gloo makes of the bucket, lie beside it.
            bucket=bucket + filled / size * run.weight_bytes * flat + filled * run.on_cpu,
            update=share * (not offloads),
            host=2 * share * offloads,
        )
    sizes = _trained_sizes(run.shape, run.split, stage, _ranks(run))
    own = size * largest_overlap(sizes, run.copies)
    if offloads:
        stays = run.weight_bytes * (largest + int(asked["reduce_bucket_size"]))
        host = run.weight_bytes * largest + own + (size + run.weight_bytes) * counts.trained / run.copies
        return ZeroBuffers(bucket=bucket, buffers=stays, host=host)
    excess = own if flat else own - share
    return ZeroBuffers(
        first=excess, later=own + (0 if flat else excess), bucket=bucket, update=0.0 if flat else own
    )


def partitioned_stage(run: PlannedRun) -> int:
    """Return the stage whose gradients the rank has: with offload, those of low precision are summed whole."""
    summed_whole = run.weight_bytes < run.gradient_bytes and "offload_optimizer" in run.offload
    return 1 if run.zero_stage == 2 and summed_whole else run.zero_stage


def straddling(run: PlannedRun, bucket: float, every_gradient: float) -> float:
    """Return the bytes of ZeRO 1's sums that a rank still has while it copies its share out of them.

    The others are freed; the sums lie in buckets, of which those at both ends of the share have other gradients too.
    """
    return min(every_gradient, every_gradient / run.copies + 2 * max(bucket, COLLECTIVE_BYTES))


@lru_cache(maxsize=4096)
def largest_overlap(sizes: tuple[int, ...], copies: int) -> int:
    """Return the most values of whole weights that a partition of the flat weights has parts of.

    Only partitions about the ends of weights have parts of several, so thousands of others are not looked at.
    """
    if not sizes:
        return 0
    ends = list(accumulate(sizes))
    starts = [0, *ends[:-1]]
    share = ends[-1] / copies
    most = max(sizes)
    for rank in {int(end / share) + beside for end in ends for beside in (-1, 0, 1)}:
        if not 0 <= rank < copies:
            continue
        first, after = bisect_right(ends, rank * share), bisect_left(starts, (rank + 1) * share)
        if first < after:
            most = max(most, ends[after - 1] - starts[first])
    return most


@lru_cache(maxsize=256)
def _trained_sizes(
    shape: ModelShape, split: PipelineSplit, stage: int, ranks: tuple[int, int]
) -> tuple[int, ...]:
    """Return the values of each trained weight of a stage, in order. ranks: that share a dense weight, and experts."""
    return tuple(_sizes(stage_parameters(shape, split, stage), *ranks))


def largest_values(run: PlannedRun, stage: int) -> int:
    """Return the values of the largest trained weight of a stage; its layers are as the model's first and last one."""
    chunks, last = run.split.chunks_of(stage), len(run.split.layers) - 1
    names = [name for name, chunk in ((EMBEDDING, 0), (HEAD, last)) if chunk in chunks and trains(run, name)]
    return max(largest_of_layer(run), table_values(run) if names else 0)


def largest_of_layer(run: PlannedRun) -> int:
    """Return the values of the largest trained weight of a layer on a rank."""
    return _largest_of_layer(run.shape, _ranks(run))


def _ranks(run: PlannedRun) -> tuple[int, int]:
    """Return over how many ranks a dense weight and the experts of a layer are cut."""
    return run.layout.tensor, run.layout.expert * run.cut_of_experts


@lru_cache(maxsize=256)
def _largest_of_layer(shape: ModelShape, ranks: tuple[int, int]) -> int:
    layers = {0, shape.num_hidden_layers - 1}
    return max(
        (size for layer in layers for size in _sizes(layer_parameters(shape, layer), *ranks)), default=0
    )


def _sizes(parameters: Iterable[Parameter], tensor: int, expert: int) -> Iterator[int]:
    place = RankPlace(Layout(tensor=tensor), 0)
    for each in (parameter for parameter in parameters if parameter.trained):
        experts = each.spec.axis == EXPERT_AXIS
        yield ceil(each.numel / expert) if experts else prod(place.local_shape(each))
