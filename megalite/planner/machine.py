"""Whether this machine has the memory that a run cannot do without. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megalite.config.output.summary import memory_text
from megalite.config.sections.derived import offload_devices, vocabulary
from megalite.config.sections.schema import RunConfig
from megalite.errors import Problem
from megalite.launcher.process import has_accelerator, total_memory_bytes
from megalite.planner.memory import memory_of_stages
from megalite.topology.dtypes import PRECISIONS
from megalite.topology.parameters import EMBEDDING, HEAD, POSITIONS, model_parameters

# More than any accelerator of today has: a rank that needs more fits on none.
_MOST_OF_A_CARD = 320 * 2**30


@dataclass(frozen=True)
class LeastMemory:
    """Bytes that a run cannot do without: weights, gradients, optimizer, hidden states and logits of a micro batch.

    rank: of the smallest rank. job: of all ranks together.
    """

    rank: float
    job: float


def least_memory(config: RunConfig) -> LeastMemory:
    """Return the least memory of a run, in the cheapest precision that "auto" can become."""
    asked = config.training.precision
    precisions = ("fp32", "bf16") if asked == "auto" else (asked,)
    return min((_least_memory(config.in_precision(each)) for each in precisions), key=lambda least: least.job)


def memory_problems(config: RunConfig, ranks: int) -> Iterator[Problem]:
    """Yield the problem of a run that certainly does not fit this machine, where `ranks` of its ranks run.

    Memory of accelerators is not known here: with one, each rank is compared with the largest card there is.
    """
    total = total_memory_bytes()
    if total is None:
        return
    least, world = least_memory(config), config.layout.world_size
    if has_accelerator():
        ranks, total = 1, _most_of_a_rank(config, total)
    needed = least.job if ranks == world else least.rank * ranks
    if needed > total:
        key, value = _largest_part(config)
        of = "one rank needs" if ranks == 1 else f"the {ranks} ranks on one machine need"
        yield Problem(
            key,
            f"{value:,} does not fit: {of} {memory_text(needed)} or more for weights, gradients, optimizer and one "
            f"micro batch, and this machine has {memory_text(total)}",
            "lower it, or spread the run over more machines (parallel.tensor, parallel.pipeline, megalite launch)",
        )


def memory_beyond_any_machine(config: RunConfig) -> Iterator[Problem]:
    """Yield the problem of a run of which one rank fits neither this machine nor the largest accelerator."""
    total = total_memory_bytes()
    if total is not None and least_memory(config).rank > _most_of_a_rank(config, total):
        yield from memory_problems(config, 1)


def _most_of_a_rank(config: RunConfig, host: int) -> int:
    """Return the most that a rank can have: of the host or of the largest card, of both with offload to the CPU."""
    offloaded = "cpu" in _offloads(config).values()
    return host + _MOST_OF_A_CARD if offloaded else max(host, _MOST_OF_A_CARD)


def _offloads(config: RunConfig) -> dict[str, Any]:
    return offload_devices(config.deepspeed_json()["zero_optimization"] if config.zero_stage else {})


def _least_memory(config: RunConfig) -> LeastMemory:
    rows, layout, precision = vocabulary(config) or 1, config.layout, config.training.precision
    batch, bytes_each = config.batch, PRECISIONS[precision].size_bytes
    tokens = batch.micro_batch_size * config.training.sequence_length // layout.context
    sliced = layout.tensor if config.parallel.sequence else 1
    hidden_states = tokens * config.model.hidden_size * bytes_each / sliced
    rows_at_once = min(tokens, config.model.chunked_loss or tokens)
    logits = rows_at_once * rows * bytes_each / layout.tensor
    totals = []
    for stage in memory_of_stages(config, rows):
        totals.append(stage.states + stage.host + hidden_states)
    totals[-1] += logits  # the V-shaped schedules have the head elsewhere, which changes no sum
    return LeastMemory(min(totals), sum(totals) * (layout.world_size // layout.pipeline))


def _largest_part(config: RunConfig) -> tuple[str, int]:
    """Return the setting, with its value, that most of the memory is due to."""
    model, training, adapter = config.model, config.training, config.adapter
    rows = vocabulary(config) or 1
    shape = config.shape(rows)
    own, all_parameters = model_parameters(replace(shape, adapter=None)), model_parameters(shape)
    tables = sum(each.numel for each in own if each.name in (EMBEDDING, POSITIONS, HEAD))
    inner = sum(each.numel for each in own) - tables
    tokens = config.batch.micro_batch_size * training.sequence_length // config.layout.context
    # A trained value has a gradient and two moments, in fp32.
    of_adapter = 4 * (sum(each.numel for each in all_parameters) - tables - inner)
    of_own = 1 if of_adapter else 4
    named = "tokenizer.vocab_size" if model.vocab_size == "auto" else "model.vocab_size"
    sizes = {
        f"adapter.{'rank' if adapter.kind == 'lora' else 'tokens'}": of_adapter,
        max((rows, named), (model.hidden_size, "model.hidden_size"))[1]: of_own * tables,
        "layers": of_own * inner,
        "tokens": tokens * (model.hidden_size + min(rows, (model.chunked_loss or tokens) * rows // tokens)),
    }
    key = max(sizes, key=lambda name: sizes[name])
    of_layers = ("model.hidden_size", "model.intermediate_size", "model.num_hidden_layers")
    keys = {"layers": of_layers, "tokens": ("training.sequence_length", "training.micro_batch_size")}
    values = {name: _value(config, name) for name in keys.get(key, (key,))}
    largest = max(values, key=lambda name: values[name])
    return largest, values[largest]


def _value(config: RunConfig, key: str) -> int:
    if key == "training.micro_batch_size":
        return config.batch.micro_batch_size
    section, name = key.split(".")
    return int(getattr(getattr(config, section), name) or 0)
