"""Cross entropy of logits whose vocabulary is split over the tensor-parallel axis, never gathering them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.ops.cross_entropy import Targets, shard_statistics, write_gradient
from megalite.parallel.collectives import gather_ranks
from megalite.parallel.mesh import Axis

IGNORE_INDEX = -100


@dataclass(frozen=True)
class LossTerms:
    """What is added to the plain cross entropy, and the shape of the vocabulary.

    vocabulary: how many ids there are in all, over which smoothing spreads. label_smoothing: the share of the
    target that is spread evenly over them (Szegedy et al. 2016). z_loss: the weight of the squared logarithm of
    the softmax's normaliser (Chowdhery et al., "PaLM", 2022, section 5).
    """

    vocabulary: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class _ShardLoss:
    """The losses of some tokens, as far as this rank's rows of the vocabulary go, and all that their gradient takes.

    targets, weights: of T tokens; a masked token weighs 0.
    """

    targets: Targets
    weights: Tensor
    tp: Axis
    terms: LossTerms
    fused: bool

    @classmethod
    def of(
        cls,
        labels: Tensor,
        loss_mask: Tensor,
        rows: range,
        tp: Axis,
        terms: LossTerms,
        fused: bool,
        dtype: torch.dtype,
    ) -> "_ShardLoss":
        """labels, loss_mask: of any shape. dtype: that of the logits."""
        smoothing = terms.label_smoothing
        flat = labels.reshape(-1)
        targets = Targets(flat, rows.start, 1 - smoothing, smoothing / terms.vocabulary)
        weights = loss_mask.reshape(-1).to(torch.promote_types(dtype, torch.float32)) * (flat != IGNORE_INDEX)
        return cls(targets, weights, tp, terms, fused)

    def in_chunks(self, tokens: int) -> Iterator["_ShardLoss"]:
        """The same of `tokens` tokens at a time."""
        for labels, weights in zip(
            self.targets.labels.split(tokens), self.weights.split(tokens), strict=True
        ):
            targets = Targets(labels, self.targets.first_id, self.targets.on_label, self.targets.uniform)
            yield _ShardLoss(targets, weights, self.tp, self.terms, self.fused)

    def working_logits(self, logits: Tensor) -> Tensor:
        """[..., columns] -> [T, columns] to compute in: their own memory, but without fused operators float32 for
        narrower ones."""
        flat = logits.detach().view(-1, logits.shape[-1])
        return flat if self.fused else flat.to(self.weights.dtype)

    def losses(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted losses [T], the same on every rank of tp; and for the gradient the shard's maximum [T] and the
        factor [T] that makes probabilities, times what z-loss brings, of its exponentials."""
        statistics = shard_statistics(logits, self.weights, self.targets, fused=self.fused)
        maximum, sums, expected = statistics
        shift, normaliser = None, maximum
        if self.tp.size > 1:
            here = self.targets.here(logits.shape[-1])
            # How much of the target this shard has: its expected logit is relative to its own maximum.
            mass = here.to(sums.dtype) * self.targets.on_label + logits.shape[-1] * self.targets.uniform
            of_ranks = gather_ranks(torch.cat([statistics, mass.unsqueeze(0)]), self.tp)
            maxima, sums_of_ranks, expected_of_ranks, masses = of_ranks.unbind(dim=1)
            normaliser = maxima.amax(dim=0)
            shifts = maxima - normaliser
            sums = (sums_of_ranks * shifts.exp()).sum(dim=0)
            expected = (expected_of_ranks + masses * shifts).sum(dim=0)
            shift = shifts[self.tp.rank]
        losses = sums.log() - expected
        factor = sums.reciprocal() if shift is None else shift.exp() / sums
        if self.terms.z_loss:
            normaliser = normaliser + sums.log()
            losses += self.terms.z_loss * normaliser.square()
            factor *= 1 + 2 * self.terms.z_loss * normaliser
        # z-loss may overflow where a masked token has huge logits.
        return torch.where(self.weights != 0, losses * self.weights, 0), maximum, factor

    def write_gradient(
        self, logits: Tensor, maximum: Tensor, factor: Tensor, grad: Tensor | None = None
    ) -> None:
        """Over what `losses` was given; grad: by the weighted losses [T], 1 if it is None."""
        weights = self.weights if grad is None else self.weights * grad
        factors = torch.where(weights != 0, factor * weights, 0)
        write_gradient(logits, maximum, factors, weights, self.targets, fused=self.fused)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: _ShardLoss) -> Tensor:
        # The logits' memory becomes the gradient; the head's linear needs them no more.
        ctx.logits, ctx.loss = loss.working_logits(logits), loss
        losses, *ctx.for_gradient = loss.losses(ctx.logits)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return losses.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.loss.write_gradient(ctx.logits, *ctx.for_gradient, grad.reshape(-1))
        logits_grad, ctx.logits = ctx.logits, None
        return logits_grad.view(ctx.shape).to(ctx.dtype), None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    rows: range,
    tp: Axis,
    terms: LossTerms,
    *,
    fused: bool = False,
) -> Tensor:
    """Token losses, weighted by `loss_mask`: [B, S], equal on every rank of `tp`, in at least float32.

    logits: [B, S, rows held here], CONSUMED: its memory holds the gradient afterwards; so backward runs once.
    labels: [B, S] global ids; IGNORE_INDEX (-100) counts as masked. loss_mask: [B, S], any non-negative weights;
    where it is 0 logits may be anything, infinite too. rows: the range of the vocabulary that this rank holds.
    terms: what comes to the plain cross entropy.
    """
    loss = _ShardLoss.of(labels, loss_mask, rows, tp, terms, fused, logits.dtype)
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, loss)  # type: ignore[no-untyped-call]
    return losses
