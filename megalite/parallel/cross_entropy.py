"""Cross entropy of logits whose vocabulary is split over the tensor-parallel axis, never gathering them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.collectives import all_reduce
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


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        rows: range,
        tp: Axis,
        terms: LossTerms,
    ) -> Tensor:
        # `.data`: the logits' memory becomes the softmax and then the gradient; the head's linear needs neither.
        softmax = logits.data.view(-1, logits.shape[-1])
        counted = (labels != IGNORE_INDEX).view(-1)
        flat_labels = labels.view(-1)
        here = counted & (flat_labels >= rows.start) & (flat_labels < rows.stop)
        local_labels = torch.where(here, flat_labels - rows.start, 0).unsqueeze(-1)
        smoothing = terms.label_smoothing

        maximum = all_reduce(softmax.amax(dim=-1), tp, dist.ReduceOp.MAX)
        softmax.sub_(maximum.unsqueeze(-1))
        target = softmax.gather(-1, local_labels).squeeze(-1) * here * (1 - smoothing)
        if smoothing:
            # A shard's part of the mean over the whole vocabulary, so that the one sum over tp below serves both.
            target += softmax.sum(dim=-1) * (smoothing / terms.vocabulary)
        softmax.exp_()
        sums, target = all_reduce(torch.stack([softmax.sum(dim=-1), target]), tp)
        normaliser = sums.log()
        losses = normaliser - target
        scale = 1 / sums
        if terms.z_loss:
            normaliser += maximum
            losses += terms.z_loss * normaliser.square()
            scale *= 1 + 2 * terms.z_loss * normaliser
        weights = loss_mask.view(-1).to(softmax.dtype) * counted
        ctx.save_for_backward(scale, weights, here, local_labels)
        ctx.softmax, ctx.shape, ctx.terms = softmax, logits.shape, terms
        # A masked position may hold any logits, inf too: it must not reach the loss as 0 * inf.
        return torch.where(weights != 0, losses * weights, 0).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        scale, weights, here, local_labels = ctx.saved_tensors
        smoothing = ctx.terms.label_smoothing
        weighted = grad.reshape(-1) * weights
        logits_grad = ctx.softmax.mul_((scale * weighted).unsqueeze(-1))
        if smoothing:
            logits_grad.sub_((weighted * (smoothing / ctx.terms.vocabulary)).unsqueeze(-1))
        logits_grad.scatter_add_(-1, local_labels, (-weighted * here * (1 - smoothing)).unsqueeze(-1))
        ctx.softmax = None
        return logits_grad.view(ctx.shape), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, loss_mask: Tensor, rows: range, tp: Axis, terms: LossTerms
) -> Tensor:
    """Token losses, weighted by `loss_mask`: [B, S], equal on every rank of `tp`.

    logits: [B, S, rows held here], CONSUMED: its memory holds the gradient afterwards; so backward runs once.
    labels: [B, S] global ids; IGNORE_INDEX (-100) counts as masked. loss_mask: [B, S], any non-negative weights.
    rows: the range of the vocabulary that this rank holds. terms: what comes to the plain cross entropy.
    """
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, loss_mask, rows, tp, terms)  # type: ignore[no-untyped-call]
    return losses
