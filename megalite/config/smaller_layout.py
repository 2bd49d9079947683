"""Finds the layout with which a run goes on when fewer ranks are left: same global batch, nearest legal sizes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from megalite.config.flags import as_flags
from megalite.config.load import LoadedRun, load_run
from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError, LaunchError
from megalite.topology.axes import Layout
from megalite.topology.sharding import divisors


@dataclass(frozen=True)
class SmallerRun:
    """The run in the smaller layout, and the flags behind the others that lead to it."""

    loaded: LoadedRun
    flags: tuple[str, ...]


def smaller_layout(path: Path | str, overrides: Sequence[str], ranks: int, slots: int) -> SmallerRun:
    """Return the run of `ranks` ranks with at most `slots`; unchanged if that is no fewer.

    Data parallelism shrinks first, then context parallelism, then the pipeline, then tensor parallelism, as far as the
    rules of the configuration allow. The global batch stays: micro batches become more, or smaller where no other
    number is legal.
    Raises LaunchError if no layout of so few ranks is legal, ConfigError if the run itself is not.
    """
    loaded = load_run(path, overrides, ranks)
    if ranks <= slots:
        return SmallerRun(loaded, ())
    problems = ""
    for flags in _candidates(loaded.config, slots):
        try:
            return SmallerRun(load_run(path, [*overrides, *flags]), flags)
        except ConfigError as error:
            problems = problems or str(error)
    raise LaunchError(
        f"no layout of {slots} rank{'s' * (slots != 1)} or fewer is legal with the same global batch of "
        f"{loaded.config.training.global_batch_size}; the nearest: {problems or 'none divides the batch'}"
    )


def _candidates(config: RunConfig, slots: int) -> Iterator[tuple[str, ...]]:
    """Yield the flags of smaller layouts, the nearest first; the rules have yet to accept them."""
    whole = config.layout
    total, size = config.batch.global_batch_size, config.batch.micro_batch_size
    tensors, contexts = reversed(divisors(whole.tensor)), reversed(divisors(whole.context))
    for tensor, pipeline, context in product(tensors, range(whole.pipeline, 0, -1), contexts):
        replica = replace(whole, tensor=tensor, context=context, pipeline=pipeline, data=1)
        for data in range(min(whole.data, slots // replica.world_size), 0, -1):
            for smaller in reversed(divisors(size)):
                if total % (smaller * data) == 0:
                    layout = _with_experts(replace(replica, data=data), config)
                    yield _flags(config, layout, smaller, total // (smaller * data))


def _with_experts(layout: Layout, config: RunConfig) -> Layout:
    """Return the layout with as many ranks among which experts are divided as its stages allow, up to those before."""
    whole, number = config.layout, config.model.num_experts
    layout = replace(layout, expert=1, expert_tensor=1 if whole.expert_tensor == 1 else None)
    sizes = (size for size in divisors(layout.expert_sizes["edp"]) if size <= whole.expert)
    # ZeRO 2 and 3 have equally many experts on each rank.
    fitting = [size for size in sizes if config.zero_stage < 2 or number % size == 0]
    return replace(layout, expert=fitting[-1])


def _flags(config: RunConfig, layout: Layout, size: int, count: int) -> tuple[str, ...]:
    settings: dict[str, object] = {
        "parallel.tensor": layout.tensor,
        "parallel.pipeline": layout.pipeline,
        "parallel.data": layout.data,
        "training.global_batch_size": size * count * layout.data,
        "training.micro_batch_size": size,
        "training.micro_batches": count,
    }
    if layout.context != config.layout.context:
        settings["parallel.context"] = layout.context
    if layout.expert != config.layout.expert:
        settings["parallel.expert"] = layout.expert
    if layout.expert_tensor != config.layout.expert_tensor:
        settings["parallel.expert_tensor"] = layout.expert_tensor
    if config.training.micro_batch_size == "auto":
        settings |= {"training.micro_batch_size": "auto", "training.micro_batches": None}
    if layout.pipeline != config.layout.pipeline:
        settings["parallel.layers_per_stage"] = None  # its numbers are those of the old stages
        if layout.pipeline == 1:
            settings["parallel.virtual_stages"] = "auto"
    return tuple(as_flags(settings))
