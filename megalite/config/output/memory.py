"""The memory of weights, gradients and optimizer state on a rank, by kind, and whether a machine has it. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from megalite.config.output.summary import memory_text
from megalite.config.sections.derived import offload_devices, vocabulary
from megalite.config.sections.schema import RunConfig
from megalite.errors import Problem
from megalite.launcher.process import has_accelerator, total_memory_bytes
from megalite.topology.dtypes import PRECISIONS
from megalite.topology.optimizers import OPTIMIZERS
from megalite.topology.parameters import (
    EMBEDDING,
    HEAD,
    POSITIONS,
    Parameter,
    model_parameters,
    stage_parameters,
)
from megalite.topology.place import RankPlace

# More than any accelerator of today has: a rank that needs more fits on none.
_MOST_OF_A_CARD = 320 * 2**30


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. Activations and buffers of collectives are not counted, but those that LeastMemory names."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def memory_line(config: RunConfig, vocab_size: int) -> str:
    """Return the memory of the largest rank by kind, for a run whose precision is known."""
    largest = max(memory_of_stages(config, vocab_size), key=lambda memory: memory.total)
    kinds = f"weights {memory_text(largest.weights)}, gradients {memory_text(largest.gradients)}"
    where = " of the largest rank" if config.layout.world_size > 1 else ""
    return (
        f"memory{where}: {kinds}, {config.optimizer.name} {memory_text(largest.optimizer)}, and activations"
    )


def memory_of_stages(config: RunConfig, vocab_size: int) -> Iterator[RankMemory]:
    """Yield the memory of the first rank of each stage, for a run whose precision is known."""
    shape = config.shape(vocab_size)
    zero = config.zero_stage
    of_weight = PRECISIONS[config.training.precision].size_bytes
    exact = max(4, of_weight)
    of_gradient = exact if config.training.accumulation == "fp32" else of_weight
    for place in RankPlace.of_stages(config.layout):
        copies = len(place.peers["dense_gradients"])
        sizes = [
            (parameter, prod(place.local_shape(parameter)))
            for parameter in stage_parameters(shape, config.split, place.at.pp)
        ]
        trained = [(parameter, numel) for parameter, numel in sizes if parameter.trained]
        weights = of_weight * sum(numel for _, numel in sizes)
        gradients = of_gradient * sum(numel for _, numel in trained)
        states = sum(_state_numel(config, parameter, place) for parameter, _ in trained)
        # ZeRO has its own fp32 copy of what it updates, also of a model in fp32.
        masters = sum(numel for _, numel in trained) if of_weight < 4 or zero else 0
        optimizer = exact * (states + masters)
        yield RankMemory(
            weights / (copies if zero == 3 else 1),
            gradients / (copies if zero >= 2 else 1),
            optimizer / (copies if zero >= 1 else 1),
        )


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
    tokens = batch.micro_batch_size * config.training.sequence_length
    sliced = layout.tensor if config.parallel.sequence else 1
    hidden_states = tokens * config.model.hidden_size * bytes_each / sliced
    rows_at_once = min(tokens, config.model.chunked_loss or tokens)
    logits = rows_at_once * rows * bytes_each / layout.tensor
    on_disk = [name for name, device in _offloads(config).items() if device == "nvme"]
    totals = []
    for stage in memory_of_stages(config, rows):
        optimizer = 0.0 if "offload_optimizer" in on_disk else stage.optimizer
        weights = 0.0 if "offload_param" in on_disk else stage.weights
        totals.append(weights + stage.gradients + optimizer + hidden_states)
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
    tokens = config.batch.micro_batch_size * training.sequence_length
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


def _state_numel(config: RunConfig, parameter: Parameter, place: RankPlace) -> int:
    """Return how many values the optimizer keeps for a rank's shard of a parameter."""
    optimizer = config.optimizer
    states = OPTIMIZERS[optimizer.name].states_of(parameter, optimizer.momentum)
    average = [parameter] if optimizer.ema_decay else []
    kept = (*average, *(state.parameter(parameter) for state in states))
    return sum(prod(place.local_shape(each)) for each in kept)
