"""All layouts of a run on a cluster: legal by the configuration's own rules, in memory, ranked by the step's time."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from math import log2
from multiprocessing import get_context

from megalite.config.output.summary import memory_text
from megalite.config.rules.every import layout_problems
from megalite.config.sections.checked import CheckedRun, KnownValues
from megalite.config.sections.derived import may_go_round
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.training_section import ComputeSettings, RecomputeMode
from megalite.errors import Problem
from megalite.launcher.process import available_cores
from megalite.planner.cluster import Cluster, Machine
from megalite.planner.memory import CARD_BASE_BYTES, RankMemory, stage_memory
from megalite.planner.planned_run import PlannedRun
from megalite.planner.step_time import StepTime, step_time
from megalite.topology.axes import Layout
from megalite.topology.context import CONTEXT_METHODS, ContextMethod
from megalite.topology.experts import MixtureShape
from megalite.topology.schedules import SCHEDULES
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import divisors
from megalite.topology.stages import PipelineSplit, pipeline_split

# GPipe and breadth-first keep every micro batch, and take as long as 1F1B and interleaved 1F1B, which do not.
_SCHEDULES = tuple(name for name, schedule in SCHEDULES.items() if not schedule.keeps_all)
# The origin that messages name.
_ORIGINS = {"deepspeed.zero_optimization": "planned"}
_MOST_STAGES = 64
_MICRO_BATCHES = (1, 2, 4, 8)
_LEAST_PART = 4096  # tokens of a sequence on a rank
# Choices that take longer to judge than processes take to start, and those that a process takes at a time.
_MANY, _AT_ONCE = 4096, 512
_RECOMPUTE: tuple[RecomputeMode, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class LayoutChoice:
    """The settings of one layout. data: replicas; sequence: sequence parallelism.

    context: ranks that share a sequence, by context_method. expert, expert_tensor: as in a `Layout`.
    """

    tensor: int
    sequence: bool
    pipeline: int
    data: int
    schedule: str
    chunks: int
    zero: int
    micro_batch_size: int
    recompute: RecomputeMode
    context: int = 1
    context_method: ContextMethod = "gather"
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def layout(self) -> Layout:
        sizes = self.pipeline, self.data, self.tensor, self.context
        return Layout(*sizes, self.expert, self.expert_tensor)

    @property
    def flags(self) -> dict[str, object]:
        """Setting -> value, as RUN.toml has them."""
        settings: dict[str, object] = {
            "parallel.tensor": self.tensor,
            "parallel.sequence": self.sequence,
            "parallel.pipeline": self.pipeline,
            "parallel.data": self.data,
            "training.micro_batch_size": self.micro_batch_size,
            "training.recompute": self.recompute,
        }
        if self.context > 1:
            settings |= {"parallel.context": self.context, "parallel.context_method": self.context_method}
        if self.expert > 1:
            settings["parallel.expert"] = self.expert
        if self.expert_tensor is not None:
            settings["parallel.expert_tensor"] = self.expert_tensor
        if self.pipeline > 1:
            settings |= {"parallel.schedule": self.schedule, "parallel.virtual_stages": self.chunks}
        if self.zero:
            settings["deepspeed.zero_optimization.stage"] = self.zero
        return settings

    def distance(self, other: "LayoutChoice") -> float:
        """Return how much one has to change to become the other: doublings of sizes, and other settings."""
        sizes = ("tensor", "context", "pipeline", "data", "expert", "micro_batch_size")
        doublings = sum(abs(log2(getattr(self, name) / getattr(other, name))) for name in sizes)
        others = ("sequence", "schedule", "zero", "recompute", "expert_tensor")
        return doublings + sum(getattr(self, name) != getattr(other, name) for name in others)


@dataclass(frozen=True)
class PlannedLayout:
    """A legal layout with its prediction. memory: of the rank that needs the most."""

    choice: LayoutChoice
    run: PlannedRun
    memory: RankMemory
    time: StepTime
    fits: bool


@dataclass(frozen=True)
class RefusedLayout:
    """A layout that a rule refuses, with the first problem."""

    choice: LayoutChoice
    problem: Problem


@dataclass(frozen=True)
class LayoutSearch:
    """All layouts: those that fit, fastest first, those that need more memory, least first, and those refused."""

    fitting: Sequence[PlannedLayout]
    too_large: Sequence[PlannedLayout]
    refused: Sequence[RefusedLayout]

    def nearest(self, choice: LayoutChoice) -> PlannedLayout | None:
        """Return the layout that fits and differs least from one that does not; the fastest of several."""
        return min(self.fitting, key=lambda layout: layout.choice.distance(choice), default=None)


def every_choice(cluster: Machine, contexts: Sequence[int]) -> Iterator[LayoutChoice]:
    """Yield the layouts of all cards, without a context method. Tensor parallelism goes as far as two nodes.

    contexts: the numbers of ranks that may share a sequence. A cut sequence is a micro batch, unless all are cut.
    """
    tensors = [size for size in divisors(cluster.cards) if size <= 2 * cluster.cards_per_node]
    for tensor, context in product(tensors, contexts):
        if cluster.cards % (tensor * context):
            continue
        sizes = _MICRO_BATCHES if context == 1 or len(contexts) == 1 else (1,)
        for pipeline in divisors(cluster.cards // (tensor * context)):
            if pipeline > _MOST_STAGES:
                break
            data = cluster.cards // (tensor * context * pipeline)
            schedules = [
                (name, chunks)
                for name in (_SCHEDULES if pipeline > 1 else ("1f1b",))
                for chunks in _chunks(name, pipeline)
            ]
            zeros = (0,) if data * context == 1 else (0, 1, 2, 3)
            kinds = product((False, True) if tensor > 1 else (False,), schedules, zeros)
            for sequence, (name, chunks), zero in kinds:
                for size, recompute in product(sizes, _RECOMPUTE):
                    yield LayoutChoice(
                        tensor, sequence, pipeline, data, name, chunks, zero, size, recompute, context
                    )


def search(
    config: RunConfig,
    vocab_size: int,
    cluster: Machine,
    *,
    context: int | None = None,
    expert: int | None = None,
    expert_tensor: int | None = None,
) -> LayoutSearch:
    """Plan every layout of a resolved run over the cards of a cluster, with the run's own global batch.

    context: the ranks that share a sequence; None: whatever leaves each enough of it. expert, expert_tensor: as in a
    `Layout`; None: one set of all experts, the most that a node can divide, and the most that a stage can.
    """
    base = PlannedRun.of(config, vocab_size, on_cpu=cluster.on_cpu)
    checked = checked_run(config, cluster.cards)
    contexts = _contexts(config, cluster) if context is None else (context,)
    dense = every_choice(cluster, contexts)
    choices = [
        replace(choice, expert=size, expert_tensor=shared)
        for choice in dense
        for size, shared in _experts(base.shape, cluster, choice, (expert, expert_tensor))
    ]
    judged = _on_all_cores(partial(_judge, base, checked, config, cluster), choices)
    planned = [layout for layout in judged if isinstance(layout, PlannedLayout)]
    refused = [layout for layout in judged if isinstance(layout, RefusedLayout)]
    fitting = sorted((layout for layout in planned if layout.fits), key=_time_and_memory)
    too_large = sorted((layout for layout in planned if not layout.fits), key=_memory)
    return LayoutSearch(fitting, too_large, refused)


def _contexts(config: RunConfig, cluster: Machine) -> tuple[int, ...]:
    """Return the sizes of the context axis that may pay: shorter parts wait longer for each other than they compute."""
    length = config.training.sequence_length
    if not isinstance(cluster, Cluster):
        return (1,)  # nothing of it is measured
    sizes = divisors(cluster.cards)
    return tuple(
        size for size in sizes if size == 1 or (length // size >= _LEAST_PART and not length % (2 * size))
    )


def _experts(
    shape: ModelShape, cluster: Machine, choice: LayoutChoice, asked: tuple[int | None, int | None]
) -> Sequence[tuple[int, int | None]]:
    """Return how the experts of a layout may be laid out: (`expert`, `expert_tensor`).

    With sequence parallelism each rank sends its own positions to whole experts, whose products stay large.
    """
    expert, shared = asked
    if not isinstance(shape, MixtureShape) or shape.experts is None:
        return [(expert or 1, shared)]
    if shared is None and choice.sequence:
        shared = 1
    if expert is not None:
        return [(expert, shared)]
    cut = choice.tensor if shared is None else shared
    stage = choice.data * choice.context * choice.tensor
    sizes = [size for size in divisors(max(1, stage // cut)) if size <= shape.experts.num_experts]
    in_a_node = max((size for size in sizes if size * cut <= cluster.cards_per_node), default=1)
    return [(size, shared) for size in sorted({1, in_a_node, sizes[-1]})]


def context_methods(config: RunConfig, shape: ModelShape, layout: Layout) -> Sequence[ContextMethod]:
    """Return the method of the settings, for "auto" those among which memory and links decide in this layout."""
    asked = config.parallel.context_method
    if layout.context == 1:
        return ("gather",)
    if asked != "auto":
        return (asked,)
    divides = shape.num_attention_heads // layout.tensor % layout.context == 0
    legal = {"gather": True, "ring": may_go_round(config), "ulysses": divides}
    return [method for method in CONTEXT_METHODS if legal[method]]


def _judge(
    base: PlannedRun, checked: CheckedRun, config: RunConfig, cluster: Machine, choice: LayoutChoice
) -> PlannedLayout | RefusedLayout:
    methods = context_methods(config, base.shape, choice.layout)
    choice = replace(choice, context_method=methods[0])
    problem = next(layout_problems(_with_choice(checked, config, choice)), None)
    if problem is not None:
        return RefusedLayout(choice, problem)
    by_methods = (replace(choice, context_method=method) for method in methods)
    planned = [plan_layout(base, each, config.batch.global_batch_size, cluster) for each in by_methods]
    fitting = [layout for layout in planned if layout.fits]
    return min(fitting, key=_time_and_memory) if fitting else min(planned, key=_memory)


def _on_all_cores(
    judge: Callable[[LayoutChoice], PlannedLayout | RefusedLayout], choices: Sequence[LayoutChoice]
) -> list[PlannedLayout | RefusedLayout]:
    """Judge all choices in order; thousands of them in a process a core.

    Not in a process that has torch: its threads do not live on in a fork, which then may end in a crash or a deadlock.
    """
    cores = available_cores()
    if cores == 1 or len(choices) < _MANY or "torch" in sys.modules:
        return list(map(judge, choices))
    with ProcessPoolExecutor(min(cores, len(choices) // _AT_ONCE), get_context("fork")) as pool:
        return list(pool.map(judge, choices, chunksize=_AT_ONCE))


def _time_and_memory(layout: PlannedLayout) -> tuple[float, float]:
    return layout.time.total, layout.memory.peak


def _memory(layout: PlannedLayout) -> float:
    return layout.memory.peak


def plan_layout(
    base: PlannedRun, choice: LayoutChoice, global_batch_size: int, cluster: Machine
) -> PlannedLayout:
    """Return the prediction of a legal layout."""
    split = _split(
        base.shape.num_hidden_layers, choice.pipeline, choice.chunks, SCHEDULES[choice.schedule].v_shaped
    )
    run = replace(
        base,
        layout=choice.layout,
        context_method=choice.context_method,
        split=split,
        schedule=choice.schedule,
        micro_batch_size=choice.micro_batch_size,
        micro_batches=global_batch_size // choice.data // choice.micro_batch_size,
        sequence_parallel=choice.sequence,
        zero_stage=choice.zero,
        offload={},
        training=_recomputing(choice.recompute),
    )
    stages = {0, _fullest_stage(run), choice.pipeline - 1}
    memory = max(
        (stage_memory(run, stage, base=CARD_BASE_BYTES) for stage in stages), key=lambda each: each.peak
    )
    fits = memory.peak <= cluster.memory_bytes * cluster.usable
    return PlannedLayout(choice, run, memory, step_time(run, cluster, memory), fits)


@lru_cache(maxsize=256)
def _split(layers: int, stages: int, chunks: int, v_shaped: bool) -> PipelineSplit:
    return pipeline_split(layers, stages, chunks_per_stage=chunks, v_shaped=v_shaped)


def checked_run(config: RunConfig, world_size: int) -> CheckedRun:
    """Return a resolved run as the rules read it."""
    names = [name for name in CheckedRun.__dataclass_fields__ if name in RunConfig.model_fields]
    sections = {name: getattr(config, name) for name in names if name != "deepspeed"}
    return CheckedRun(
        **sections, deepspeed={}, world_size=world_size, origins=_ORIGINS, incomplete=(), launched=None
    )


def needs_too_much(layout: PlannedLayout, cluster: Machine) -> str:
    """Return why a layout does not fit a card."""
    has = cluster.memory_bytes * cluster.usable
    return (
        f"needs {memory_text(layout.memory.peak)} on a card, of which a run may plan with {memory_text(has)}"
    )


def _with_choice(checked: CheckedRun, config: RunConfig, choice: LayoutChoice) -> CheckedRun:
    parallel = {
        "tensor": choice.tensor,
        "sequence": choice.sequence,
        "context": choice.context,
        "context_method": choice.context_method,
        "expert": choice.expert,
        "expert_tensor": choice.expert_tensor,
        "pipeline": choice.pipeline,
        "data": choice.data,
        "schedule": choice.schedule,
        "virtual_stages": choice.chunks,
        "layers_per_stage": None,
    }
    training = {
        **dict(config.training),
        "micro_batch_size": choice.micro_batch_size,
        "micro_batches": None,
        "global_batch_size": config.batch.global_batch_size,
        "recompute": choice.recompute,
        "recompute_layers": None,
        "recompute_ratio": None,
    }
    deepspeed = {"zero_optimization": {"stage": choice.zero}} if choice.zero else {}
    sections = {"parallel": KnownValues(parallel), "training": KnownValues(training)}
    return replace(checked, **sections, deepspeed=deepspeed)  # type: ignore[arg-type]


def _chunks(schedule: str, stages: int) -> tuple[int, ...]:
    """Return the numbers of chunks a stage that are tried."""
    only = SCHEDULES[schedule].only_chunks
    if stages == 1:
        return (1,)
    return (only,) if only else (1, 2, 4) if schedule == "interleaved_zero_bubble" else (2, 4)


def _fullest_stage(run: PlannedRun) -> int:
    """Return the first stage with the most layers."""
    return max(range(run.split.stages), key=lambda stage: len(run.split.layers_of(stage)))


_COMPUTE = {mode: ComputeSettings(recompute=mode) for mode in _RECOMPUTE}


def _recomputing(mode: RecomputeMode) -> ComputeSettings:
    return _COMPUTE[mode]
