"""Cross entropy of logits whose vocabulary is split over the tensor-parallel axis, never gathering them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.collectives import all_reduce
from megalite.parallel.mesh import Axis

IGNORE_INDEX = -100


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, loss_mask: Tensor, rows: range, tp: Axis) -> Tensor:
        # `.data`: the logits' memory becomes the softmax and then the gradient; the head's linear needs neither.
        softmax = logits.data.view(-1, logits.shape[-1])
        counted = (labels != IGNORE_INDEX).view(-1)
        flat_labels = labels.view(-1)
        here = counted & (flat_labels >= rows.start) & (flat_labels < rows.stop)
        local_labels = torch.where(here, flat_labels - rows.start, 0).unsqueeze(-1)

        maximum = all_reduce(softmax.amax(dim=-1), tp, dist.ReduceOp.MAX)
        softmax.sub_(maximum.unsqueeze(-1))
        target = softmax.gather(-1, local_labels).squeeze(-1) * here
        softmax.exp_()
        sums_and_targets = all_reduce(torch.stack([softmax.sum(dim=-1), target]), tp)
        sums, target = sums_and_targets[0], sums_and_targets[1]
        weights = loss_mask.view(-1).to(softmax.dtype) * counted
        ctx.save_for_backward(sums, weights, here, local_labels)
        ctx.softmax, ctx.shape = softmax, logits.shape
        # A masked position may hold any logits, inf too: it must not reach the loss as 0 * inf.
        return torch.where(weights != 0, (sums.log() - target) * weights, 0).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        sums, weights, here, local_labels = ctx.saved_tensors
        scale = grad.reshape(-1) * weights
        logits_grad = ctx.softmax.mul_((scale / sums).unsqueeze(-1))
        logits_grad.scatter_add_(-1, local_labels, (-scale * here).unsqueeze(-1))
        ctx.softmax = None
        return logits_grad.view(ctx.shape), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, loss_mask: Tensor, rows: range, tp: Axis
) -> Tensor:
    """Token losses, weighted by `loss_mask`: [B, S], equal on every rank of `tp`.

    logits: [B, S, rows held here], CONSUMED: its memory holds the gradient afterwards; so backward runs once.
    labels: [B, S] global ids; IGNORE_INDEX (-100) counts as masked. loss_mask: [B, S], any non-negative weights.
    rows: the range of the vocabulary that this rank holds.
    """
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, loss_mask, rows, tp)  # type: ignore[no-untyped-call]
    return losses
