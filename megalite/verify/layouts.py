"""The layouts of `megalite verify --matrix N`: every division of up to N ranks, and what may change in each. No torch.

The rules of the configuration decide which are legal, as they do for `megalite train`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megalite.config.flags import as_flags
from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError, Problem
from megalite.topology.axes import Layout
from megalite.topology.context import CONTEXT_METHODS
from megalite.topology.schedules import SCHEDULES
from megalite.topology.sharding import divisors

Settings = Mapping[str, Any]
"""`section.key` -> value; None: left at its default."""

_ZERO = "deepspeed.zero_optimization"
# By default ZeRO 3 keeps weights as small as those of a shrunk model whole on every rank.
_PARTITION_ALL = {f"{_ZERO}.stage3_param_persistence_threshold": 100}
_AXES = ("parallel.tensor", "parallel.pipeline", "parallel.data", "parallel.context")
# Legal on any division where a run asks for nothing else.
_PLAIN: Mapping[str, Settings] = {
    "sequence": {"parallel.sequence": False},
    "schedule": {"parallel.schedule": "1f1b", "parallel.virtual_stages": "auto"},
    "zero": {f"{_ZERO}.stage": 0},
    "context": {"parallel.context_method": "auto"},
}


@dataclass(frozen=True)
class LegalLayout:
    """A layout that the rules accept. name: as people write it; flags: those that lead to it from the run file."""

    name: str
    flags: Sequence[str]
    config: RunConfig


@dataclass(frozen=True)
class UnusableLayout:
    """A layout that a rule, or this machine, refuses, with the first problem."""

    name: str
    problem: Problem


@dataclass(frozen=True)
class LayoutMatrix:
    """The layouts of up to N ranks, few ranks first. run: the run as its file has it."""

    run: RunConfig
    legal: Sequence[LegalLayout]
    refused: Sequence[UnusableLayout]

    @property
    def reasons(self) -> dict[str, tuple[int, UnusableLayout]]:
        """Setting whose rule refuses -> the number of layouts that it refuses, and the first."""
        reasons: dict[str, tuple[int, UnusableLayout]] = {}
        for layout in self.refused:
            count, first = reasons.get(layout.problem.key, (0, layout))
            reasons[layout.problem.key] = count + 1, first
        return reasons


def layout_matrix(path: Path | str | None, overrides: Sequence[str], ranks: int) -> LayoutMatrix:
    """Return the layouts of 1 to `ranks` ranks for a run file, each with the run's model, data and global batch.

    They are all divisions of the ranks over the tensor, pipeline, data and context axes with the run's own sequence
    parallelism, schedule, ZeRO stage, context method and experts where these are legal, and plain ones where not; and
    each division with one of these five changed to each of its other values.
    Raises ConfigError if the run itself is wrong.
    """
    run = load_run(path, overrides).config
    legal: list[LegalLayout] = []
    refused: list[UnusableLayout] = []
    for sizes in _divisions(ranks):
        begun = len(legal)
        for name, settings in _forms(sizes, run):
            flags = tuple(as_flags(settings))
            try:
                config = load_run(path, [*overrides, *flags]).config
            except ConfigError as error:
                refused.append(UnusableLayout(name, error.problems[0]))
                continue
            # Settings that "auto" or the rules resolve to those of a layout before.
            if all(config != before.config for before in legal[begun:]):
                legal.append(LegalLayout(name, flags, config))
    return LayoutMatrix(run, legal, refused)


def axes_without_effect(path: Path | str | None, overrides: Sequence[str], ranks: int) -> list[str]:
    """Return the sizes of the run's own layout among the flags that change none of the layouts of 1 to `ranks` ranks.

    A size may have an effect, as parallel.data on a global batch that is not set. Raises ConfigError if the run itself
    is wrong.
    """
    words = [word.partition("=")[0] for word in overrides]
    named = [axis for axis in _AXES if f"--{axis}" in words]
    if not named:
        return []
    configs = [layout.config for layout in layout_matrix(path, overrides, ranks).legal]
    idle = []
    for axis in named:
        # The value is in the word behind, unless it is in the flag's own.
        fewer = [
            word
            for before, word in zip(["", *overrides], overrides, strict=False)
            if before != f"--{axis}" and word.partition("=")[0] != f"--{axis}"
        ]
        with suppress(ConfigError):
            if [layout.config for layout in layout_matrix(path, fewer, ranks).legal] == configs:
                idle.append(axis)
    return idle


def _divisions(most: int) -> Iterator[Layout]:
    """Yield every division of 1 to `most` ranks over the four axes."""
    for ranks in range(1, most + 1):
        for tensor, context in product(divisors(ranks), repeat=2):
            if ranks % (tensor * context) == 0:
                for pipeline in divisors(ranks // (tensor * context)):
                    data = ranks // (tensor * context * pipeline)
                    yield Layout(pipeline, data, tensor, context)


def _forms(layout: Layout, run: RunConfig) -> Iterator[tuple[str, Settings]]:
    """Yield name and settings of a division as the run has its other settings, then with one of them changed."""
    base = {**_sizes(layout, run), **_own(layout, run)}
    name = " x ".join(f"{axis} {size}" for axis, size in layout.named_sizes.items() if size > 1) or "one rank"
    yield name, base
    for changed, settings in _changes(layout, run):
        yield f"{name}, {changed}", {**base, **settings}


def _sizes(layout: Layout, run: RunConfig) -> dict[str, Any]:
    """Return the settings of a division, with the run's global batch in micro batches that divide it."""
    total, size = run.batch.global_batch_size, run.batch.micro_batch_size
    fitting = [micro for micro in divisors(max(1, total // layout.data)) if micro <= size]
    return {
        "parallel.tensor": layout.tensor,
        "parallel.pipeline": layout.pipeline,
        "parallel.data": layout.data,
        "parallel.context": layout.context,
        "parallel.layers_per_stage": None,  # its numbers are those of the run's own stages
        "training.global_batch_size": total,
        "training.micro_batch_size": fitting[-1],
        "training.micro_batches": None,
    }


def _own(layout: Layout, run: RunConfig) -> dict[str, Any]:
    """Return the run's own way of cutting, and plain settings for what a division does not have."""
    own, parallel = dict[str, Any](), run.parallel
    if layout.tensor == 1:
        own |= _PLAIN["sequence"]
    if layout.pipeline == 1 or parallel.pipeline == 1:
        own |= _PLAIN["schedule"]
    elif SCHEDULES[parallel.schedule].only_chunks is None:
        own["parallel.virtual_stages"] = parallel.virtual_stages
    if run.zero_stage and layout.copies == 1:
        own |= _PLAIN["zero"]
    elif run.zero_stage >= 2 and layout.pipeline > 1:
        own[f"{_ZERO}.stage"] = 1
    if layout.context == 1:
        own |= _PLAIN["context"]
    if parallel.expert > 1 or parallel.expert_tensor is not None:
        # The most ranks up to the run's own among which a stage can divide the experts.
        shared = parallel.expert_tensor
        own["parallel.expert_tensor"] = shared if layout.tensor > 1 else None
        own["parallel.expert"] = max(
            size for size in _expert_sizes(layout, shared) if size <= parallel.expert
        )
    return own


def _changes(layout: Layout, run: RunConfig) -> Iterator[tuple[str, Settings]]:
    """Yield name and settings of each change of one of the five, whatever the run itself has."""
    if layout.tensor > 1:
        for on in (False, True):
            yield f"sequence {'on' if on else 'off'}", {"parallel.sequence": on}
    if layout.pipeline > 1:
        for schedule in SCHEDULES:
            yield schedule, {"parallel.schedule": schedule, "parallel.virtual_stages": "auto"}
    if layout.copies > 1:
        for stage in range(0 if run.zero_stage else 1, 4):
            zero = {f"{_ZERO}.stage": stage, **(_PARTITION_ALL if stage == 3 else {})}
            yield f"ZeRO {stage}", zero
    if layout.context > 1:
        for method in CONTEXT_METHODS:
            yield method, {"parallel.context_method": method}
    if run.model.num_experts:
        for shared in (None, 1) if layout.tensor > 1 else (None,):
            for size in _expert_sizes(layout, shared):
                whole = "" if shared is None else ", each whole"
                settings = {"parallel.expert": size, "parallel.expert_tensor": shared}
                # Whole experts on tensor ranks take each rank's own positions.
                yield f"expert {size}{whole}", settings | ({"parallel.sequence": True} if shared else {})


def _expert_sizes(layout: Layout, shared: int | None) -> Sequence[int]:
    """Return the numbers of ranks among which a stage can divide the experts; shared: as Layout.expert_tensor."""
    stage = layout.world_size // layout.pipeline
    return divisors(stage // (layout.tensor if shared is None else shared))


def shortest_flags(path: Path | str | None, overrides: Sequence[str], layout: LegalLayout) -> list[str]:
    """Return the flags of a layout without those that the run file has anyway, for a person to type."""
    flags = [*layout.flags]
    for flag in layout.flags:
        fewer = [other for other in flags if other != flag]
        with suppress(ConfigError):
            if load_run(path, [*overrides, *fewer]).config == layout.config:
                flags = fewer
    return flags
