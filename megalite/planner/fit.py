"""The largest micro batch that fits a rank or a card, the longest sequence, and the memory of models by size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megalite.config.sections.schema import RunConfig
from megalite.config.sections.training_section import LEAST_MICRO_BATCH, ComputeSettings, RecomputeMode
from megalite.planner.memory import CARD_BASE_BYTES, RankMemory, stage_memory
from megalite.planner.parameter_count import ParameterCount
from megalite.planner.planned_run import PlannedRun
from megalite.topology.axes import Layout
from megalite.topology.schedules import SCHEDULES
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import divisors
from megalite.topology.stages import pipeline_split

_MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")
_MOST = 2**20
_FILLED = 4  # micro batches a stage: 1F1B idles at most a fifth of the time
_TOKENS_OF_A_SEQUENCE = 64  # sequences are lengthened in steps of so many tokens


@dataclass(frozen=True)
class CardFit:
    """The most that fits one card with a mode of recomputation; 0: nothing does.

    micro_batch_size: at the run's sequence length. sequence_length: of a micro batch of one sequence.
    """

    recompute: RecomputeMode
    micro_batch_size: int
    sequence_length: int


def card_fits(run: PlannedRun, limit_bytes: float) -> Iterator[CardFit]:
    """Yield the most that fits `limit_bytes` in one process, for each mode of recomputation."""
    alone = on_one_card(run)
    for mode in _MODES:
        moded = replace(alone, training=ComputeSettings(recompute=mode))

        def batch_fits(size: int, run: PlannedRun = moded) -> bool:
            return _peak(replace(run, micro_batch_size=size)) <= limit_bytes

        def length_fits(number: int, run: PlannedRun = moded) -> bool:
            length = number * _TOKENS_OF_A_SEQUENCE
            return _peak(replace(run, micro_batch_size=1, sequence_length=length)) <= limit_bytes

        longest = alone.shape.longest_sequence // _TOKENS_OF_A_SEQUENCE
        lengths = min(_largest(length_fits), longest)
        yield CardFit(mode, _largest(batch_fits), lengths * _TOKENS_OF_A_SEQUENCE)


def legal_micro_batches(config: RunConfig) -> list[int]:
    """Return the micro batch sizes of the run's global batch that its schedule can run, in ascending order.

    With a pipeline only those with enough micro batches to fill it, if there are any; else the smallest.
    """
    batch, stages, schedule = config.batch, config.layout.pipeline, SCHEDULES[config.parallel.schedule]
    least, chunks = LEAST_MICRO_BATCH[config.data.kind], config.split.chunks_per_stage
    rows = batch.global_batch_size // batch.data
    whole = [size for size in divisors(rows) if size % least == 0]
    if stages == 1:
        return whole
    legal = [size for size in whole if not schedule.problem(stages, rows // size, chunks)]
    return [size for size in legal if rows // size >= _FILLED * stages] or legal[:1]


def micro_batch_bytes(run: PlannedRun, stage: int, size: int, *, base: float) -> float:
    """Return the peak of a rank of a stage with micro batches of `size` in the run's global batch."""
    count = run.micro_batch_size * run.micro_batches // size
    return stage_memory(replace(run, micro_batch_size=size, micro_batches=count), stage, base=base).peak


def on_one_card(run: PlannedRun) -> PlannedRun:
    """Return the run in one process, which accumulates gradients over two micro batches or more."""
    return replace(
        run,
        layout=Layout(),
        split=pipeline_split(run.shape.num_hidden_layers),
        schedule="1f1b",
        micro_batches=max(2, run.micro_batches),
        sequence_parallel=False,
        zero_stage=0,
        offload={},
    )


def _peak(run: PlannedRun) -> float:
    return stage_memory(run, 0, base=CARD_BASE_BYTES).peak


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, 0 if none does; more never fits where less does not."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < _MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class MemoryBand:
    """A model of the sizes of GPT-3 (Brown et al. 2020, table 2.1) on one card, in bf16 with AdamW."""

    name: str
    parameters: int
    memory: RankMemory


# Name -> hidden size, layers, heads.
_SIZES = {
    "125M": (768, 12, 12),
    "350M": (1024, 24, 16),
    "1.3B": (2048, 24, 16),
    "2.7B": (2560, 32, 32),
    "6.7B": (4096, 32, 32),
    "13B": (5120, 40, 40),
}
BAND_ROWS, BAND_LENGTH = 50257, 2048


def memory_bands() -> Iterator[MemoryBand]:
    """Yield the memory of models by size: one sequence of 2,048 tokens at a time, selective recomputation."""
    for name, (hidden, layers, heads) in _SIZES.items():
        shape = ModelShape(
            vocab_size=BAND_ROWS,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=hidden // heads,
            max_position_embeddings=BAND_LENGTH,
            tie_word_embeddings=True,
            position_embedding="learned",
            norm="layer_norm",
            gated_mlp=False,
            hidden_act="gelu",
        )
        training = ComputeSettings(recompute="selective")
        split = pipeline_split(layers)
        run = PlannedRun(shape, Layout(), split, "1f1b", 1, 2, BAND_LENGTH, "bf16", training=training)
        memory = stage_memory(run, 0, base=CARD_BASE_BYTES)
        yield MemoryBand(name, ParameterCount.of(shape).total, memory)
