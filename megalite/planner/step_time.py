"""The time of a step from operations, bubble and traffic: assumed for a `Cluster`, measured for a machine."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from megalite.monitor.cards import CARDS
from megalite.planner.bubble import bubble
from megalite.planner.calibrated_step import CalibratedMachine, calibrated_seconds
from megalite.planner.cluster import Cluster, Machine
from megalite.planner.experts import context_seconds, exchange_seconds, layers_with_experts, reduction_factors
from megalite.planner.memory import RankMemory
from megalite.planner.planned_run import PlannedRun
from megalite.topology.flops import attention_flops, flops_per_token, forward_flops
from megalite.topology.shape import ModelShape

# The share of a micro batch's time that its backward takes, beside which gradients are summed.
_BACKWARD = 2 / 3


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. compute: of the slowest stage. tensor, pipeline, data: traffic that no computation hides.

    update: reading and writing the optimizer's state. fixed: what every step takes, whatever its size; measured alone.
    context, experts: keys and values, and tokens, between ranks.
    """

    compute: float
    bubble: float
    tensor: float
    pipeline: float
    data: float
    update: float
    fixed: float = 0.0
    context: float = 0.0
    experts: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def step_time(run: PlannedRun, machine: Machine, memory: RankMemory) -> StepTime:
    """Return the time of a step on cards of data sheets or on a calibrated machine. memory: of the fullest rank.

    Raises ValueError if the card has no tensor cores for the precision, ConfigError if nothing was measured in it.
    """
    if isinstance(machine, CalibratedMachine):
        return StepTime(**calibrated_seconds(run, machine))
    assert isinstance(machine, Cluster), "one of the two machines there are"
    return _assumed_time(run, machine, memory)


def _assumed_time(run: PlannedRun, cluster: Cluster, memory: RankMemory) -> StepTime:
    """Return the time of a step by the assumptions of a cluster.

    Tensor-parallel sums are not hidden. The sums of gradients run beside the last backward, a ring's messages beside
    attention, the first and the last transfer of a pipeline wait for nobody.
    """
    peak = cluster.peak(run.precision)
    if peak is None:
        raise ValueError(f"{cluster.card} has no peak for {run.precision}")
    layers = max(
        len(run.split.layers_of(stage)) for stage in {0, run.split.stages // 2, run.split.stages - 1}
    )
    operations = max(
        _stage_operations(run, stage) for stage in {0, run.split.stages // 2, run.split.stages - 1}
    )
    micro_batch = operations * run.tokens / run.layout.tensor / (peak * cluster.efficiency)
    sums = _tensor_seconds(run, cluster) * layers
    compute, tensor = run.micro_batches * micro_batch, run.micro_batches * sums
    attention = _attention_operations(run) * run.tokens / run.layout.tensor / (peak * cluster.efficiency)
    context = run.micro_batches * context_seconds(run, cluster, attention) * layers
    experts = run.micro_batches * exchange_seconds(run, cluster) * layers_with_experts(run)
    traffic = tensor + context + experts
    idle = bubble(run.schedule, run.split.stages, run.micro_batches, run.split.chunks_per_stage)
    return StepTime(
        compute,
        (compute + traffic) * idle / (1 - idle),
        tensor,
        _pipeline_seconds(run, cluster),
        _data_seconds(run, cluster, memory, _BACKWARD * micro_batch),
        2 * memory.states / (CARDS[cluster.card].memory * 1e9),
        context=context,
        experts=experts,
    )


@lru_cache(maxsize=256)
def _operations(shape: ModelShape, length: int) -> tuple[tuple[int, ...], tuple[int, ...], int, float]:
    """Return forward operations: of the layers up to each, of their attention, of the head; and the step's multiple."""
    forward = forward_flops(shape, length)
    factor = flops_per_token(shape, length) / (sum(forward.layers) + forward.head)
    attention = accumulate(attention_flops(shape, length))
    return (0, *accumulate(forward.layers)), (0, *attention), forward.head, factor


def _stage_operations(run: PlannedRun, stage: int) -> float:
    """Return the operations of a token on a stage, forward and backward, with what is recomputed."""
    layer_sums, attention_sums, head, factor = _operations(run.shape, run.sequence_length)
    forward = again = 0.0
    for chunk in run.split.chunks_of(stage):
        layers = run.split.layers[chunk]
        of_chunk = layer_sums[layers.stop] - layer_sums[layers.start]
        forward += of_chunk + (head if chunk == len(run.split.layers) - 1 else 0)
        mode = run.training.recompute
        chosen = run.training.recompute_modes(len(layers)).count(mode)
        repeated = {
            "none": 0,
            "selective": attention_sums[layers.stop] - attention_sums[layers.start],
            "full": of_chunk,
        }
        again += repeated[mode] * chosen / len(layers)
    return factor * forward + again


def _attention_operations(run: PlannedRun) -> float:
    """Return the operations of a token in the attention of a layer, forward and backward, with what is recomputed."""
    _, attention, _, factor = _operations(run.shape, run.sequence_length)
    return (factor + (run.training.recompute != "none")) * attention[-1] / run.shape.num_hidden_layers


def _tensor_seconds(run: PlannedRun, cluster: Cluster) -> float:
    """Return the time of a layer's sums over the tensor-parallel ranks in one micro batch.

    Two in the forward, two in the backward and two when the layer is recomputed, each an all-reduce or a gather and a
    scatter of the same volume; with sequence parallelism the backward gathers both inputs again.
    """
    ranks = run.layout.tensor
    if ranks == 1:
        return 0.0
    hidden = run.tokens * run.shape.hidden_size * run.weight_bytes
    sums = 4 + 2 * (run.training.recompute == "full") + run.sequence_parallel
    return sums * 2 * (ranks - 1) / ranks * hidden / cluster.bandwidth(ranks, 1)


def _pipeline_seconds(run: PlannedRun, cluster: Cluster) -> float:
    """Return the time of the transfers while the pipeline fills and drains."""
    stages = run.layout.pipeline
    if stages == 1:
        return 0.0
    hidden = run.positions * run.shape.hidden_size * run.weight_bytes
    stride = run.layout.world_size // stages
    return 2 * (stages - 1) * hidden / cluster.bandwidth(stages, stride, ring=False)


def _data_seconds(run: PlannedRun, cluster: Cluster, memory: RankMemory, hidden: float) -> float:
    """Return the time of sums and gathers over the replicas that lasts longer than `hidden`."""
    ranks, stage = run.copies, run.zero_stage
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks / cluster.bandwidth(ranks, run.layout.tensor)
    of_weights, of_gradients = reduction_factors(run)
    weights = memory.weights * (ranks if stage == 3 else 1) * of_weights
    gradients = memory.gradients * (ranks if stage >= 2 else 1) * of_gradients
    if stage < 2:
        gather = weights * share if stage else 0.0
        return max(0.0, 2 * gradients * share - hidden) + gather
    # In every micro batch; ZeRO 3 gathers the weights for the forward and for the backward.
    rounds = run.micro_batches
    gathers = 2 * rounds if stage == 3 else 1
    return max(0.0, rounds * (gradients * share - hidden)) + gathers * weights * share
