"""The tables of docs/learn/ and docs/troubleshooting.md that the planner computes.

python -m docs.lessons        # writes them anew, between the marks in the pages
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from megalite.config.load import load_run
from megalite.config.sections.derived import vocabulary
from megalite.config.sections.schema import RunConfig
from megalite.planner.fit import memory_bands
from megalite.planner.memory import RankMemory, largest_rank
from megalite.planner.planned_run import PlannedRun

FOLDER = Path(__file__).parent
EXAMPLE = FOLDER.parent / "examples" / "pretrain" / "1b.toml"
RANKS = 8
GIB = 2**30
HALF = ("--parallel.data", "4")
CHANGES: dict[str, tuple[str, ...]] = {
    "as it is: ZeRO 1, micro batch 4": (),
    "`--training.micro_batch_size 2`": ("--training.micro_batch_size", "2"),
    "`--training.micro_batch_size 1`": ("--training.micro_batch_size", "1"),
    "`--training.recompute selective`": ("--training.recompute", "selective"),
    "`--training.recompute full`": ("--training.recompute", "full"),
    "`--training.recompute full --training.recompute_ratio 0.5`": (
        "--training.recompute",
        "full",
        "--training.recompute_ratio",
        "0.5",
    ),
    "`--deepspeed.zero_optimization.stage 2`": ("--deepspeed.zero_optimization.stage", "2"),
    "`--deepspeed.zero_optimization.stage 3`": ("--deepspeed.zero_optimization.stage", "3"),
    "`--deepspeed.zero_optimization.offload_optimizer.device cpu`": (
        "--deepspeed.zero_optimization.offload_optimizer.device",
        "cpu",
    ),
    "`--parallel.tensor 2 --parallel.data 4`": ("--parallel.tensor", "2", *HALF),
    "the same with `--parallel.sequence true`": (
        "--parallel.tensor",
        "2",
        *HALF,
        "--parallel.sequence",
        "true",
    ),
    "`--parallel.pipeline 2 --parallel.data 4`": ("--parallel.pipeline", "2", *HALF),
    "`--training.sequence_length 1024`": ("--training.sequence_length", "1024"),
}
"""Words of a change to the example -> its flags."""


@cache
def example(*flags: str) -> RunConfig:
    """Return the settings of the example's run with these flags, for eight ranks."""
    return load_run(str(EXAMPLE), ["--data.source", "stdlib", *flags], world_size=RANKS).config


@cache
def example_memory(*flags: str) -> RankMemory:
    """Return the planned memory of the largest rank of the example's run."""
    config = example(*flags)
    return largest_rank(PlannedRun.of(config, vocabulary(config)))


def zero_bytes(stage: int) -> dict[str, float]:
    """Return the bytes of a parameter on each data-parallel rank, by kind: bf16, AdamW, fp32 gradient sums."""
    memory = example_memory("--deepspeed.zero_optimization.stage", str(stage))
    whole = example_memory("--deepspeed.zero_optimization.stage", "0").weights / 2
    return {kind: memory.kinds[kind] / whole for kind in ("weights", "gradients", "masters", "moments")}


def savings() -> Iterator[str]:
    """Yield a table: memory of a rank of the example by kind, for each setting that lowers it."""
    yield "| 1b.toml on 8 cards, GiB a card | weights, gradients, AdamW | activations | logits | buffers | peak |"
    yield "|---|---|---|---|---|---|"
    for words, flags in CHANGES.items():
        memory = example_memory(*flags)
        parts = (memory.states, memory.activations, memory.loss, memory.buffers)
        cells = [f"{size / GIB:.1f}" for size in (*parts, memory.peak)]
        yield f"| {words} | {' | '.join(cells)} |"


BANDS = {"125M": (4, 8), "350M": (8, 16), "1.3B": (16, 32), "6.7B": (32, None)}
"""Size of a model -> GB that guides of this field name for its training."""


def bands() -> Iterator[str]:
    """Yield a table: what guides name for a size of model beside what the planner counts."""
    yield "| model | 18 bytes a parameter | activations and logits | peak, GiB | guides say, GB |"
    yield "|---|---|---|---|---|"
    for band in memory_bands():
        memory = band.memory
        least, most = BANDS.get(band.name, (0, None))
        guide = (f"{least} to {most}" if most else f"{least} or more") if least else ""
        cells = (memory.states, memory.activations + memory.loss, memory.peak)
        yield f"| {band.name} | {' | '.join(f'{size / GIB:.1f}' for size in cells)} | {guide} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {"savings": savings, "bands": bands}


def with_tables(text: str) -> str:
    """Return a page with each of its tables computed anew."""

    def table(mark: re.Match[str]) -> str:
        rows = "\n".join(TABLES[mark[1]]())
        return f"<!-- {mark[1]}: python -m docs.lessons -->\n{rows}\n<!-- end -->"

    return re.sub(r"<!-- (\w+): python -m docs\.lessons -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in (*FOLDER.glob("*.md"), *(FOLDER / "learn").glob("*.md")):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
