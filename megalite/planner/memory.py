"""The memory of a rank, by kind: the one answer to "how many bytes", for train, launch, config, init and plan."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import mul

from megalite.config.output.summary import TOKENS_PER_PARAMETER, memory_text, tokens_text
from megalite.config.sections.derived import vocabulary
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.training_section import RecomputeMode
from megalite.planner.activations import Activations, head_activations
from megalite.planner.arriving_gradients import (
    product_bytes,
    table_bytes,
    table_values,
    trains,
    waiting_bytes,
)
from megalite.planner.experts import block_activations
from megalite.planner.liveness import ChunkMemory, LiveState, schedule_states, stage_moments
from megalite.planner.planned_run import PlannedRun
from megalite.planner.stage_parameters import ValueCounts, ZeroShares, chunk_counts, stage_counts
from megalite.planner.zero_buffers import (
    ZeroBuffers,
    largest_of_layer,
    largest_values,
    partitioned_stage,
    straddling,
    zero_buffers,
)
from megalite.topology.collective_sizes import BUCKET_BYTES, COLLECTIVE_BYTES
from megalite.topology.optimizers import OPTIMIZERS
from megalite.topology.parameters import HEAD, alike, parameter_count
from megalite.topology.schedules import FORWARD
from megalite.topology.shape import ModelShape
from megalite.topology.transfers import ACTIONS_AHEAD

STATE_BYTES = 2 + 4 + 4 + 4 * len(OPTIMIZERS["adamw"].state)
"""Bytes per parameter of AdamW in bf16: weights 2, gradients 4, fp32 weights 4, moments 8."""
CARD_BASE_BYTES = 1 << 30
"""A process on a card beside its tensors: context, libraries, work spaces; 0.82 GiB on an H100 without NCCL."""
OFFLOADED_AT_ONCE = 4
"""Storages on their way to or from the host with `training.offload_activations`, in hidden states."""
_ID_BYTES = 8  # of a token, a label, a position


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. peak: at the highest moment of a step; every kind: at its own, so that their sum may be more.

    masters: float32 copies of the weights. moments: the optimizer's state beside them. activations: of the decoder
    layers, with what their forward and backward need meanwhile. loss: logits and loss. buffers: of collectives,
    transfers, batches and gradients on their way to their sums. base: of the process itself. host: of the states that
    offload keeps in the host's memory.
    """

    weights: float
    gradients: float
    masters: float
    moments: float
    activations: float
    loss: float
    buffers: float
    base: float
    host: float
    peak: float

    @property
    def optimizer(self) -> float:
        """Moments and masters."""
        return self.masters + self.moments

    @property
    def states(self) -> float:
        """All that stays from step to step, with the gradients."""
        return self.weights + self.gradients + self.optimizer

    @property
    def kinds(self) -> dict[str, float]:
        """Kind -> bytes on the rank's own device."""
        return {field.name: getattr(self, field.name) for field in fields(self)[:-2]}


def needs_line(config: RunConfig) -> str:
    """Return memory for training with AdamW in bf16, and tokens for the number of parameters; "" without vocabulary.

    Tokens: 20 per parameter, the compute-optimal number of Hoffmann et al. 2022.
    """
    rows = vocabulary(config)
    if rows is None:
        return ""
    count = parameter_count(config.model.shape(rows))
    return f"{memory_text(count * STATE_BYTES)} and {tokens_text(count * TOKENS_PER_PARAMETER)} tokens"


def memory_of_stages(
    config: RunConfig, vocab_size: int, *, on_cpu: bool = False, plain_torch: bool = False
) -> Iterator[RankMemory]:
    """Yield the memory of the first rank of each stage, without the process's own, for a run of known precision."""
    run = PlannedRun.of(config, vocab_size, on_cpu=on_cpu, plain_torch=plain_torch)
    yield from (stage_memory(run, stage) for stage in range(run.layout.pipeline))


def largest_rank(run: PlannedRun, *, base: float = 0.0) -> RankMemory:
    """Return the memory of the rank that needs the most. base: bytes of a process before its first tensor."""
    return max(
        (stage_memory(run, stage, base=base) for stage in range(run.layout.pipeline)),
        key=lambda memory: memory.peak,
    )


def stage_memory(run: PlannedRun, stage: int, *, base: float = 0.0) -> RankMemory:
    """Return the memory of the first rank of a stage, which needs as much as any rank of it."""
    counts, zero = stage_counts(run, stage), run.zero_stage
    shares = ZeroShares.of(run, counts)
    weights = run.weight_bytes * shares.weights
    whole = partitioned_stage(run) < 2
    every_gradient = run.gradient_bytes * (counts.trained if whole else shares.gradients)
    # ZeRO has its own fp32 copy of what it updates, also of a model in fp32.
    has_masters = run.weight_bytes < 4 or bool(zero)
    masters = run.exact_bytes * shares.updated * has_masters
    moments = run.exact_bytes * shares.state
    of_zero = zero_buffers(run, stage, counts)
    buffers, bucket, on_host = _buffers(run) + of_zero.buffers, _bucket(run, stage, counts), 0.0
    device = run.offload.get("offload_optimizer")
    if device:
        on_host, masters, moments = (masters + moments) * (device == "cpu"), 0.0, 0.0
        on_host += of_zero.host * (device == "cpu")
    if device := run.offload.get("offload_param"):
        on_host, weights = on_host + weights * (device == "cpu"), 0.0
    # ZeRO 3's share of the gradients is there from the beginning, on the host if the optimizer is.
    always = every_gradient * (zero == 3 and not device)
    chunks = _chunks(run, stage, 0.0 if zero == 3 else every_gradient, (counts, of_zero))
    states = stage_states(run, stage)
    if run.offloads_activations:
        on_host += _kept_by_layers(chunks, states)
        chunks = {chunk: _offloaded(memory, run) for chunk, memory in chunks.items()}
    step = stage_moments(states, chunks)
    fullest = max(step, key=lambda moment: moment.activations + moment.loss)
    end = _end(run, stage, counts, every_gradient, bucket, of_zero)
    peak = (
        always + weights + masters + moments + buffers + max(end - always, *(moment.total for moment in step))
    )
    # Nothing of the optimizer is there before: neither here nor, where that is the same memory, on the host.
    peak = base + max(peak, _start(run, stage, counts) - on_host * run.on_cpu)
    passing = max(end, *(always + moment.gradients for moment in step)) - every_gradient
    return RankMemory(
        weights,
        every_gradient,
        masters,
        moments,
        fullest.activations,
        fullest.loss,
        buffers + max(0.0, passing),
        base,
        on_host,
        peak,
    )


def _kept_by_layers(chunks: Mapping[int, ChunkMemory], states: Sequence[LiveState]) -> float:
    """Return the most bytes that layers keep of all micro batches between forward and backward."""
    kept = [chunks[chunk].layers.kept for chunk in sorted(chunks)]
    return max(
        sum(map(mul, state.numbers, kept)) + (state.kind == FORWARD) * chunks[state.chunk].layers.kept
        for state in states
    )


def _offloaded(memory: ChunkMemory, run: PlannedRun) -> ChunkMemory:
    """Return what a chunk keeps on the device while its layers' tensors are on the host, but for those on their way."""
    layers = memory.layers
    on_the_way = min(
        layers.kept, OFFLOADED_AT_ONCE * run.positions * run.shape.hidden_size * run.weight_bytes
    )
    return replace(
        memory,
        layers=Activations(0.0, layers.deferred, layers.forward + on_the_way, layers.backward + on_the_way),
    )


def _end(
    run: PlannedRun,
    stage: int,
    counts: ValueCounts,
    every_gradient: float,
    bucket: float,
    of_zero: ZeroBuffers,
) -> float:
    """Return the bytes of gradients and of the update's own values at the end of a step.

    All gradients are there, and no activation: then a bucket of them, the copies that ZeRO makes, or the update's.
    """
    updated = run.exact_bytes * ZeroShares.of(run, counts).updated
    record, one = (
        OPTIMIZERS[run.optimizer.name],
        run.exact_bytes * largest_values(run, stage),
    )
    # Without ZeRO's flat weights torch's SGD on the host goes through them one by one.
    by_one = run.on_cpu and not run.zero_stage and run.optimizer.name == "sgd"
    of_matrix = record.working_on_matrix * run.exact_bytes * largest_of_layer(run)
    of_update = max(one if by_one else record.working * updated, record.working_on_largest * one, of_matrix)
    if partitioned_stage(run) == 1 and run.zero_stage:
        # Its share moves out of the sums, which are freed then.
        return max(
            every_gradient + bucket,
            straddling(run, bucket, every_gradient) + of_zero.update,
            of_zero.update + of_update,
        )
    return every_gradient + max(bucket, of_update + of_zero.update)


def _start(run: PlannedRun, stage: int, counts: ValueCounts) -> float:
    """Return the bytes before the first step: of initial values, or of DeepSpeed's flat copy of the weights.

    Values are drawn in float64, a weight at a time; frozen ones are read.
    """
    weights = run.weight_bytes * counts.weights
    flat = ZeroShares.of(run, counts).updated if run.zero_stage == 3 else counts.trained
    drawn = 8.0 * largest_values(run, stage) * (run.shape.adapter is None)
    return weights + max(run.weight_bytes * flat * (run.zero_stage > 0), drawn)


def memory_line(
    config: RunConfig, vocab_size: int, *, on_cpu: bool = False, plain_torch: bool = False
) -> str:
    """Return the memory of the largest rank by kind, for a run whose precision is known."""
    largest = largest_rank(PlannedRun.of(config, vocab_size, on_cpu=on_cpu, plain_torch=plain_torch))
    where = " of the largest rank" if config.layout.world_size > 1 else ""
    return f"memory{where}: {kinds_text(largest, config.optimizer.name)}"


def state_equations(config: RunConfig, vocab_size: int) -> Iterator[str]:
    """Yield for each state of the largest rank "weights 2,000 bytes = 500 values * 4 bytes"; of a known precision.

    The values are this rank's: its tensor slices and layers, with ZeRO its share of them. None for offloaded states.
    """
    run = PlannedRun.of(config, vocab_size)
    memory, exact = largest_rank(run), run.exact_bytes
    sizes = {"weights": run.weight_bytes, "gradients": run.gradient_bytes, "masters": exact, "moments": exact}
    for kind, size in sizes.items():
        if number := memory.kinds[kind]:
            yield f"{kind} {round(number):,} bytes = {round(number / size):,} values * {size} bytes"


def kinds_text(memory: RankMemory, optimizer: str, *, largest_first: bool = False) -> str:
    """Return the memory by kind: "weights 2.1 GiB, gradients ..., adamw ..., activations ..., logits ..."."""
    sizes = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        optimizer: memory.optimizer,
        "activations": memory.activations,
        "logits": memory.loss,
        "buffers": memory.buffers,
        "on the host": memory.host,
    }
    often_none = ("logits", "buffers", "on the host")
    kept = {name: size for name, size in sizes.items() if size or name not in often_none}
    if largest_first:
        kept = dict(sorted(kept.items(), key=lambda kind: -kind[1]))
    return ", ".join(f"{name} {memory_text(size)}" for name, size in kept.items())


def _chunks(
    run: PlannedRun, stage: int, every_gradient: float, of_stage: tuple[ValueCounts, ZeroBuffers]
) -> Mapping[int, ChunkMemory]:
    """Return chunk -> what it keeps of a micro batch; the gradients outside of layers go to the stage's last chunk."""
    counts, of_zero = of_stage
    chunks, last = run.split.chunks_of(stage), len(run.split.layers) - 1
    trained_head = trains(run, HEAD)
    memories, left = {}, every_gradient
    known: dict[tuple[RecomputeMode, int], Activations] = {}
    for chunk in chunks:
        layers = _layers(run, chunk, known)
        loss = Activations()
        if chunk == last:
            norm, loss = head_activations(run, trained=trained_head)
            layers = Activations(layers.kept + norm.kept, layers.deferred, layers.forward, layers.backward)
        # A chunked loss has the head's gradient from the forward on.
        heads = table_values(run) * (chunk == last and trained_head and not run.model.chunked_loss)
        gradients = every_gradient * chunk_counts(run, chunk).trained / max(1, counts.trained)
        left -= gradients
        memories[chunk] = ChunkMemory(
            layers,
            loss,
            gradients + (left if chunk == chunks[-1] else 0),
            run.gradient_bytes * heads,
            product_bytes(run, heads),
            waiting_bytes(run) if chunk == last else 0.0,
            table_bytes(run) if chunk == 0 else 0.0,
            of_zero,
        )
    return memories


def _layers(run: PlannedRun, chunk: int, known: dict[tuple[RecomputeMode, int], Activations]) -> Activations:
    """Return the activations of a chunk's layers together; one of them runs at a time. known: by mode and layer."""
    layers = run.split.layers[chunk]
    number = _kinds(run.shape, layers, run.training.recompute_modes(len(layers)))
    for key in number:
        if key not in known:
            known[key] = block_activations(run, *key)
    return Activations(
        sum(known[key].kept * times for key, times in number.items()),
        sum(known[key].deferred * times for key, times in number.items()),
        max(known[key].forward for key in number),
        max(known[key].backward for key in number),
    )


@lru_cache(maxsize=1024)
def _kinds(
    shape: ModelShape, layers: range, modes: tuple[RecomputeMode, ...]
) -> Counter[tuple[RecomputeMode, int]]:
    """Return recomputation and first layer of each kind -> the number of layers like it."""
    return Counter((mode, alike(shape, layer)) for mode, layer in zip(modes, layers, strict=True))


def stage_states(run: PlannedRun, stage: int) -> tuple[LiveState, ...]:
    """Return the states of a stage in a step; with one stage those of 1F1B, which is gradient accumulation."""
    stages, chunks = run.split.stages, run.split.chunks_per_stage
    name = run.schedule if stages > 1 else "1f1b"
    return schedule_states(name, stage, stages, run.micro_batches, chunks)


def _buffers(run: PlannedRun) -> float:
    """Return the bytes of messages between stages, and of two batches of ids."""
    hidden = run.positions * run.shape.hidden_size * run.weight_bytes
    messages = 2 * ACTIONS_AHEAD * hidden if run.layout.pipeline > 1 else 0.0
    # ids, labels, positions and the loss mask, of this step and the next; of a cut sequence a rank has its part too.
    tokens = run.micro_batches * run.tokens
    rows = 2 * tokens * run.layout.context + tokens * (run.layout.context > 1)
    return messages + rows * (3 * _ID_BYTES + 4)


def _bucket(run: PlannedRun, stage: int, counts: ValueCounts) -> float:
    """Return the bytes of a bucket in which gradients are summed over the replicas, without ZeRO or with ZeRO 1."""
    if run.copies == 1 or run.zero_stage > 1:
        return 0.0
    bytes_a_chunk = [
        run.weight_bytes * chunk_counts(run, chunk).trained for chunk in run.split.chunks_of(stage)
    ]
    least = min(max(bytes_a_chunk), max(BUCKET_BYTES, run.weight_bytes * _layer_values(run, stage)))
    bucket = min(least, COLLECTIVE_BYTES) * run.gradient_bytes / run.weight_bytes
    return min(bucket, run.gradient_bytes * counts.trained)


def _layer_values(run: PlannedRun, stage: int) -> float:
    """Return the mean trained values of a layer of a stage."""
    layers = run.split.layers_of(stage)
    return sum(chunk_counts(run, chunk).trained for chunk in run.split.chunks_of(stage)) / max(1, len(layers))
