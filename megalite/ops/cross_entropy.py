"""Softmax cross entropy of the logits that one shard of the vocabulary holds: what is read of them, and the gradient
written over them. What joins the shards stands in parallel/cross_entropy.py.

A row is a token. Weights, statistics and factors are at least float32. Both forms overwrite logits; only the gradient
can follow the statistics. Where no other shard has a part, one visit of each row can do both (`losses_over_gradient`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.ops import extension


@dataclass(frozen=True)
class Targets:
    """The distribution that each row's softmax should be: `on_label` at its label beside `uniform` at every id.

    labels: [T] int64, ids of the whole vocabulary; those of other shards, or of none, are elsewhere.
    first_id: the id of the shard's first column.
    """

    labels: Tensor
    first_id: int
    on_label: float = 1.0
    uniform: float = 0.0

    def here(self, columns: int) -> Tensor:
        """Which rows have their label among the shard's columns: [T] bool."""
        return (self.labels >= self.first_id) & (self.labels < self.first_id + columns)


def shard_statistics(logits: Tensor, weights: Tensor, targets: Targets) -> Tensor:
    """[3, T]: of each row the maximum, sum(exp(logit - maximum)), and sum(target * (logit - maximum)).

    logits: [T, columns], to be handed on to `write_gradient` and read by nobody else. weights: [T]; rows of weight 0
    may hold anything, and give numbers without a meaning, but finite ones.
    """
    if logits.device.type == "cpu":
        logits.index_fill_(0, (weights == 0).nonzero().squeeze(-1), 0)
    else:
        # Visits every row, but the host need not wait to learn which.
        logits.masked_fill_((weights == 0).unsqueeze(-1), 0)
    # A shard may hold nothing but -inf, which then adds 0 to the others' sums, and no NaN.
    maximum = logits.amax(dim=-1).clamp_(min=torch.finfo(logits.dtype).min)
    logits.sub_(maximum.unsqueeze(-1))
    here = targets.here(logits.shape[-1])
    at_label = logits.gather(-1, _local_labels(targets, here)).squeeze(-1)
    expected = torch.where(here, at_label * targets.on_label, 0)
    if targets.uniform:
        expected += logits.sum(dim=-1) * targets.uniform
    return torch.stack([maximum, logits.exp_().sum(dim=-1), expected])


def compiled_shard_statistics(logits: Tensor, weights: Tensor, targets: Targets) -> Tensor:
    """As of `shard_statistics`; logits stay as they are."""
    statistics: Tensor = torch.ops.megalite.cross_entropy_statistics(
        logits, targets.labels, weights, targets.first_id, targets.on_label, targets.uniform
    )
    return statistics


def write_gradient(
    logits: Tensor, maximum: Tensor, factor: Tensor, weights: Tensor, targets: Targets
) -> None:
    """Make of logits their gradient: exp(logit - maximum) * factor - target * weight; maximum to weights: [T].

    maximum: of the statistics. Rows whose factor and weight are 0 become 0.
    """
    # The statistics have left exp(logit - maximum).
    logits.mul_(factor.unsqueeze(-1))
    if targets.uniform:
        logits.sub_((weights * targets.uniform).unsqueeze(-1))
    here = targets.here(logits.shape[-1])
    at_label = torch.where(here, weights * -targets.on_label, 0)
    logits.scatter_add_(-1, _local_labels(targets, here), at_label.unsqueeze(-1))


def compiled_write_gradient(
    logits: Tensor, maximum: Tensor, factor: Tensor, weights: Tensor, targets: Targets
) -> None:
    """As of `write_gradient`."""
    torch.ops.megalite.cross_entropy_gradient_(
        logits,
        targets.labels,
        maximum,
        factor,
        weights,
        targets.first_id,
        targets.on_label,
        targets.uniform,
    )


def visits_rows_once(logits: Tensor) -> bool:
    """Whether `losses_over_gradient` takes them: compiled code on the CPU, whose caches hold a row. What is narrower
    than its statistics would lose by a factor that comes afterwards; a GPU would have to be waited for to see it."""
    return logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64)


def losses_over_gradient(logits: Tensor, weights: Tensor, targets: Targets, z_loss: float) -> Tensor:
    """Weighted losses [T], of logits [T, the whole vocabulary], which become the gradient of their sum.

    weights: [T]; a row of weight 0 may hold anything, and has loss and gradient 0.
    """
    losses: Tensor = torch.ops.megalite.cross_entropy_losses_(
        logits, targets.labels, weights, targets.first_id, targets.on_label, targets.uniform, z_loss
    )
    return losses


@dataclass(frozen=True)
class ShardCrossEntropy:
    """An implementation: `shard_statistics`, `write_gradient`, and `losses_over_gradient` where it has one.

    reads_low_precision: bf16 and fp16 logits are computed from where they lie; else a float32 copy is made first.
    """

    statistics: Callable[[Tensor, Tensor, Targets], Tensor]
    write_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Targets], None]
    losses_over_gradient: Callable[[Tensor, Tensor, Targets, float], Tensor] | None
    reads_low_precision: bool


TORCH_CROSS_ENTROPY = ShardCrossEntropy(shard_statistics, write_gradient, None, reads_low_precision=False)
COMPILED_CROSS_ENTROPY = ShardCrossEntropy(
    compiled_shard_statistics, compiled_write_gradient, losses_over_gradient, reads_low_precision=True
)


def _local_labels(targets: Targets, here: Tensor) -> Tensor:
    """Columns [T, 1]; 0 where the label is elsewhere."""
    return torch.where(here, targets.labels - targets.first_id, 0).unsqueeze(-1)


def _fake_statistics(
    logits: Tensor, labels: Tensor, weights: Tensor, first_id: int, on_label: float, uniform: float
) -> Tensor:
    return weights.new_empty(3, logits.shape[0])


def _fake_gradient(logits: Tensor, *others: object) -> None:
    """Only writes over what it is given."""


def _fake_losses(logits: Tensor, labels: Tensor, weights: Tensor, *others: object) -> Tensor:
    return torch.empty_like(weights)


extension.register("cross_entropy_statistics", _fake_statistics)
extension.register("cross_entropy_gradient_", _fake_gradient)
extension.register("cross_entropy_losses_", _fake_losses)
