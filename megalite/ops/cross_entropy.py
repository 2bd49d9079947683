"""Softmax cross entropy over one shard of the vocabulary: statistics of its logits, and the gradient, which overwrites
the logits. parallel/cross_entropy.py combines the shards.

A row is a token. Weights, statistics and factors are at least float32. The statistics come first, then the gradient. If
one shard holds the whole vocabulary, one pass over each row computes both (`losses_over_gradient`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.ops import extension


@dataclass(frozen=True)
class Targets:
    """The target distribution of each row's softmax: `uniform` at every id, plus `on_label` at the row's label.

    labels: [T] int64, ids of the whole vocabulary; a label outside this shard's columns has no column here.
    first_id: the id of the shard's first column.
    """

    labels: Tensor
    first_id: int
    on_label: float = 1.0
    uniform: float = 0.0

    def here(self, columns: int) -> Tensor:
        """Return whether each row's label is one of the shard's columns: [T] bool."""
        return (self.labels >= self.first_id) & (self.labels < self.first_id + columns)


def shard_statistics(logits: Tensor, weights: Tensor, targets: Targets) -> Tensor:
    """Return [3, T]: each row's maximum, sum(exp(logit - maximum)), and sum(target * (logit - maximum)).

    logits: [T, columns], overwritten: only `write_gradient` may read them afterwards. weights: [T]; rows of weight 0
    may hold any values, NaN too; their statistics are finite and have no meaning.
    """
    if logits.device.type == "cpu":
        logits.index_fill_(0, (weights == 0).nonzero().squeeze(-1), 0)
    else:
        # Writes every row, but needs no device sync to learn which rows are masked.
        logits.masked_fill_((weights == 0).unsqueeze(-1), 0)
    # A row of the shard may be all -inf: it must add 0 to the other shards' sums, not NaN.
    maximum = logits.amax(dim=-1).clamp_(min=torch.finfo(logits.dtype).min)
    logits.sub_(maximum.unsqueeze(-1))
    here = targets.here(logits.shape[-1])
    at_label = logits.gather(-1, _local_labels(targets, here)).squeeze(-1)
    expected = torch.where(here, at_label * targets.on_label, 0)
    if targets.uniform:
        expected += logits.sum(dim=-1) * targets.uniform
    return torch.stack([maximum, logits.exp_().sum(dim=-1), expected])


def compiled_shard_statistics(logits: Tensor, weights: Tensor, targets: Targets) -> Tensor:
    """Same as `shard_statistics`, by the compiled operator; does not change logits."""
    statistics: Tensor = torch.ops.megalite.cross_entropy_statistics(
        logits, targets.labels, weights, targets.first_id, targets.on_label, targets.uniform
    )
    return statistics


def write_gradient(
    logits: Tensor, maximum: Tensor, factor: Tensor, weights: Tensor, targets: Targets
) -> None:
    """Overwrite logits with their gradient: exp(logit - maximum) * factor - target * weight.

    maximum (of the statistics), factor, weights: [T]. Rows with factor and weight 0 become 0.
    """
    # shard_statistics left exp(logit - maximum) in the logits.
    logits.mul_(factor.unsqueeze(-1))
    if targets.uniform:
        logits.sub_((weights * targets.uniform).unsqueeze(-1))
    here = targets.here(logits.shape[-1])
    at_label = torch.where(here, weights * -targets.on_label, 0)
    logits.scatter_add_(-1, _local_labels(targets, here), at_label.unsqueeze(-1))


def compiled_write_gradient(
    logits: Tensor, maximum: Tensor, factor: Tensor, weights: Tensor, targets: Targets
) -> None:
    """Same as `write_gradient`, by the compiled operator."""
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
    """Return whether `losses_over_gradient` supports these logits: fp32 and fp64 on a CPU, whose caches hold a row.

    A low-precision gradient would be rounded before the upstream gradient scales it, and on a GPU reading that
    gradient's value is a device sync.
    """
    return logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64)


def losses_over_gradient(logits: Tensor, weights: Tensor, targets: Targets, z_loss: float) -> Tensor:
    """Return weighted losses [T] and overwrite logits [T, whole vocabulary] with the gradient of their sum.

    weights: [T]; a row of weight 0 may hold any values, NaN too; its loss and gradient are 0.
    """
    losses: Tensor = torch.ops.megalite.cross_entropy_losses_(
        logits, targets.labels, weights, targets.first_id, targets.on_label, targets.uniform, z_loss
    )
    return losses


@dataclass(frozen=True)
class ShardCrossEntropy:
    """One implementation: `shard_statistics`, `write_gradient`, and `losses_over_gradient` if it has one.

    reads_low_precision: bf16 and fp16 logits are read in place; otherwise an fp32 copy is made first.
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
    """Return each label's column [T, 1]; 0 if the label is on another shard."""
    return torch.where(here, targets.labels - targets.first_id, 0).unsqueeze(-1)


def _fake_statistics(
    logits: Tensor, labels: Tensor, weights: Tensor, first_id: int, on_label: float, uniform: float
) -> Tensor:
    return weights.new_empty(3, logits.shape[0])


def _fake_gradient(logits: Tensor, *others: object) -> None:
    """Return nothing: the operator overwrites `logits`."""


def _fake_losses(logits: Tensor, labels: Tensor, weights: Tensor, *others: object) -> Tensor:
    return torch.empty_like(weights)


extension.register("cross_entropy_statistics", _fake_statistics)
extension.register("cross_entropy_gradient_", _fake_gradient)
extension.register("cross_entropy_losses_", _fake_losses)
