"""The memory of weights, gradients and optimizer state on a rank, by kind. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megalite.config.schema import RunConfig
from megalite.config.summary import memory_text
from megalite.topology.parameters import Parameter, stage_parameters

_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. Activations and buffers of collectives are not counted."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def memory_line(config: RunConfig, vocab_size: int) -> str:
    """Return the memory of the largest rank by kind, for a run whose precision is known."""
    each = max(memory_of_stages(config, vocab_size), key=lambda memory: memory.total)
    kinds = f"weights {memory_text(each.weights)}, gradients {memory_text(each.gradients)}"
    where = " of the largest rank" if config.layout.world_size > 1 else ""
    return f"memory{where}: {kinds}, {config.optimizer.name} {memory_text(each.optimizer)}, and activations"


def memory_of_stages(config: RunConfig, vocab_size: int) -> Iterator[RankMemory]:
    """Yield the memory of the first tensor-parallel rank of each stage, for a run whose precision is known."""
    shape = config.shape(vocab_size)
    tp, copies, zero = config.layout.tensor, config.layout.data, config.zero_stage
    of_weight = _BYTES[config.training.precision]
    exact = max(4, of_weight)
    of_gradient = exact if config.training.accumulation == "fp32" else of_weight
    for stage in range(config.layout.pipeline):
        held = [
            (each, prod(each.spec.local_shape(0, tp)))
            for each in stage_parameters(shape, config.split, stage)
        ]
        trained = [(each, numel) for each, numel in held if each.trained]
        weights = of_weight * sum(numel for _, numel in held)
        gradients = of_gradient * sum(numel for _, numel in trained)
        states = sum(_state_numel(config, each) for each, _ in trained)
        # ZeRO has its own fp32 copy of what it updates, also of a model in fp32.
        masters = sum(numel for _, numel in trained) if of_weight < 4 or zero else 0
        optimizer = exact * (states + masters)
        yield RankMemory(
            weights / (copies if zero == 3 else 1),
            gradients / (copies if zero >= 2 else 1),
            optimizer / (copies if zero >= 1 else 1),
        )


def _state_numel(config: RunConfig, parameter: Parameter) -> int:
    """Return how many values the optimizer keeps for the first tensor-parallel rank's shard of a parameter."""
    optimizer, tp = config.optimizer, config.layout.tensor
    shard = prod(parameter.spec.local_shape(0, tp))
    average = shard if optimizer.ema_decay else 0
    if optimizer.name == "sgd":
        return average + (shard if optimizer.momentum else 0)
    if optimizer.name == "lion" or (optimizer.name == "muon" and parameter.is_hidden_matrix):
        return average + shard
    if optimizer.name == "adafactor":
        matrix = len(parameter.spec.full_shape) == 2
        moments = sum(sum(region.shape) for _, region in parameter.spec.slices(0, tp))
        return average + (moments if matrix else shard)
    return average + 2 * shard
