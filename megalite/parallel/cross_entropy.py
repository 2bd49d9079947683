"""Vocabulary-parallel cross entropy: the logits are split over the tensor-parallel axis and never gathered."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from megalite.ops.activations import cap_with_slope
from megalite.ops.cross_entropy import (
    TORCH_CROSS_ENTROPY,
    ShardCrossEntropy,
    Targets,
    visits_rows_once,
)
from megalite.parallel.collectives import gather_ranks
from megalite.parallel.mesh import RankGroup

IGNORE_INDEX = -100


@dataclass(frozen=True)
class LossTerms:
    """Label smoothing and z-loss, and the size of the vocabulary.

    vocabulary: the number of ids. label_smoothing: the share of the target that is spread evenly over all ids (Szegedy
    et al. 2016). z_loss: the weight of the squared logarithm of the softmax's normaliser (Chowdhery et al., "PaLM",
    2022, section 5).
    """

    vocabulary: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of the vocabulary on this rank, the ranks that hold the others, and the operator over their logits."""

    rows: range
    tp: RankGroup
    operator: ShardCrossEntropy = TORCH_CROSS_ENTROPY


@dataclass(frozen=True)
class _ShardLoss:
    """The losses of T tokens over this rank's rows of the vocabulary, and the inputs of their gradient.

    targets, weights: [T]; the weight of a masked token is 0.
    """

    targets: Targets
    weights: Tensor
    shard: VocabularyShard
    terms: LossTerms

    @classmethod
    def of(
        cls,
        labels: Tensor,
        loss_mask: Tensor,
        shard: VocabularyShard,
        terms: LossTerms,
        dtype: torch.dtype,
    ) -> "_ShardLoss":
        """Build from labels and loss_mask of any shape; dtype: the logits' dtype."""
        smoothing = terms.label_smoothing
        flat = labels.reshape(-1).contiguous()
        targets = Targets(flat, shard.rows.start, 1 - smoothing, smoothing / terms.vocabulary)
        weights = loss_mask.reshape(-1).to(torch.promote_types(dtype, torch.float32)) * (flat != IGNORE_INDEX)
        return cls(targets, weights, shard, terms)

    def in_chunks(self, tokens: int) -> Iterator["_ShardLoss"]:
        """Yield the losses of `tokens` tokens at a time."""
        for labels, weights in zip(
            self.targets.labels.split(tokens), self.weights.split(tokens), strict=True
        ):
            targets = Targets(labels, self.targets.first_id, self.targets.on_label, self.targets.uniform)
            yield _ShardLoss(targets, weights, self.shard, self.terms)

    def working_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [..., columns] as [T, columns] to overwrite: a view, or a float32 copy of low precision."""
        flat = logits.detach().view(-1, logits.shape[-1])
        return flat if self.shard.operator.reads_low_precision else flat.to(self.weights.dtype)

    def losses_over_gradient(self, logits: Tensor) -> Tensor | None:
        """Return weighted losses [T] and overwrite the logits with the gradient of their sum, in one pass over rows.

        None if this needs two passes: `losses`, then `write_gradient`.
        """
        in_one_visit = self.shard.operator.losses_over_gradient
        if in_one_visit is None or self.shard.tp.size > 1 or not visits_rows_once(logits):
            return None
        return in_one_visit(logits, self.weights, self.targets, self.terms.z_loss)

    def losses(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weighted losses [T], equal on every rank of tp; then the shard's row maximum [T] and a factor [T].

        factor * exp(logit - maximum) is the softmax probability, times z-loss's factor in the gradient.
        """
        statistics = self.shard.operator.statistics(logits, self.weights, self.targets)
        maximum, sums, expected = statistics
        shift, normaliser = None, maximum
        if self.shard.tp.size > 1:
            here = self.targets.here(logits.shape[-1])
            # The target's probability mass on this shard: corrects the expected logit for the change of maximum.
            mass = here.to(sums.dtype) * self.targets.on_label + logits.shape[-1] * self.targets.uniform
            of_ranks = gather_ranks(torch.cat([statistics, mass.unsqueeze(0)]), self.shard.tp)
            maxima, sums_of_ranks, expected_of_ranks, masses = of_ranks.unbind(dim=1)
            normaliser = maxima.amax(dim=0)
            shifts = maxima - normaliser
            sums = (sums_of_ranks * shifts.exp()).sum(dim=0)
            expected = (expected_of_ranks + masses * shifts).sum(dim=0)
            shift = shifts[self.shard.tp.rank]
        losses = sums.log() - expected
        factor = sums.reciprocal() if shift is None else shift.exp() / sums
        if self.terms.z_loss:
            normaliser = normaliser + sums.log()
            losses += self.terms.z_loss * normaliser.square()
            factor *= 1 + 2 * self.terms.z_loss * normaliser
        # `where`, because z-loss may overflow for the huge logits of a masked token.
        return torch.where(self.weights != 0, losses * self.weights, 0), maximum, factor

    def write_gradient(
        self, logits: Tensor, maximum: Tensor, factor: Tensor, grad: Tensor | None = None
    ) -> None:
        """Overwrite the logits of `losses` with their gradient; grad: d/d(weighted losses) [T], None: 1."""
        weights = self.weights if grad is None else self.weights * grad
        factors = torch.where(weights != 0, factor * weights, 0)
        self.shard.operator.write_gradient(logits, maximum, factors, weights, self.targets)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: _ShardLoss, differentiated: bool) -> Tensor:
        # The gradient overwrites the logits, which the head's linear does not need in its backward. Compiled operators
        # do not bump a tensor's version: without it autograd could not detect that another node saved the logits.
        ctx.logits, ctx.loss = loss.working_logits(logits), loss
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        losses = loss.losses_over_gradient(ctx.logits) if differentiated else None
        ctx.has_gradient = losses is not None
        if losses is None:
            losses, *ctx.for_gradient = loss.losses(ctx.logits)
        else:
            increment_version(ctx.logits)
        return losses.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, ctx.logits = ctx.logits, None
        if logits is None:
            raise RuntimeError("the gradient of a cross entropy is in the logits' memory: backward runs once")
        if not ctx.has_gradient:
            ctx.loss.write_gradient(logits, *ctx.for_gradient, grad.reshape(-1))
            increment_version(logits)
        elif not _is_one(grad):
            logits.mul_(grad.reshape(-1, 1))
        return logits.view(ctx.shape).to(ctx.dtype), None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    shard: VocabularyShard,
    terms: LossTerms,
) -> Tensor:
    """Return token losses weighted by `loss_mask`: [B, S], equal on every rank of tp, in at least float32.

    logits: [B, S, rows held here], overwritten: holds d(loss)/d(logits) after backward; on the one-pass path already
    after forward, assuming an upstream gradient of 1. Backward can therefore run only once.
    labels: [B, S] global ids; IGNORE_INDEX (-100) counts as masked. loss_mask: [B, S], any non-negative weights; logits
    of tokens with weight 0 may have any values, infinities too. terms: label smoothing and z-loss.
    """
    loss = _ShardLoss.of(labels, loss_mask, shard, terms, logits.dtype)
    differentiated = torch.is_grad_enabled() and logits.requires_grad
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, loss, differentiated)  # type: ignore[no-untyped-call]
    return losses


@dataclass(frozen=True)
class LogitTransform:
    """Changes to the logits before the loss: divided by `scaling`, then softcap * tanh(logit / softcap)."""

    softcap: float | None = None
    scaling: float = 1.0


@dataclass(frozen=True)
class ChunkedHead:
    """The output projection of a chunked loss: weight [rows, H], bias [rows], and the tokens whose logits exist at
    once."""

    weight: Tensor
    bias: Tensor | None
    chunk_tokens: int
    transform: LogitTransform = LogitTransform()


@dataclass(frozen=True)
class _Gradients:
    """The gradients of the sum of a chunked loss, filled chunk by chunk; None for inputs that need no gradient.

    hidden_states: [T, H]; weight: [rows, H] and bias: [rows], both initially zero, in at least float32.
    """

    hidden_states: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @property
    def needed(self) -> bool:
        return any(each is not None for each in (self.hidden_states, self.weight, self.bias))

    def add(self, at: int, inputs: Tensor, logits_grad: Tensor, weight: Tensor) -> None:
        """Add the gradients of one chunk, whose first token is `at`, given the gradient of its logits."""
        if self.bias is not None:
            self.bias.add_(logits_grad.sum(dim=0))
        low = logits_grad.to(weight.dtype)
        if self.hidden_states is not None:
            torch.mm(low, weight, out=self.hidden_states[at : at + len(inputs)])
        if self.weight is not None:
            _add_product(self.weight, low.t(), inputs)


@torch.no_grad()
def _in_chunks(hidden_states: Tensor, head: ChunkedHead, loss: _ShardLoss, gradients: _Gradients) -> Tensor:
    """Return the losses [T] of hidden_states [T, H]; fill the gradients of their sum."""
    losses, at, tokens, transform = [], 0, head.chunk_tokens, head.transform
    for inputs, chunk in zip(hidden_states.split(tokens), loss.in_chunks(tokens), strict=True):
        logits = chunk.working_logits(F.linear(inputs, head.weight, head.bias))
        if transform.scaling != 1:
            logits.div_(transform.scaling)
        slope = None if transform.softcap is None else cap_with_slope(logits, transform.softcap)
        of_chunk = chunk.losses_over_gradient(logits) if gradients.needed else None
        if of_chunk is None:
            of_chunk, *for_gradient = chunk.losses(logits)
            if gradients.needed:
                chunk.write_gradient(logits, *for_gradient)
        losses.append(of_chunk)
        if gradients.needed:
            if slope is not None:
                logits.mul_(slope)
            if transform.scaling != 1:
                logits.div_(transform.scaling)
            gradients.add(at, inputs, logits, head.weight)
            at += len(inputs)
        del logits, slope  # before the next chunk's are made
    return torch.cat(losses)


class _KnownGradient(torch.autograd.Function):
    """Returns `values`, whose sum has a known gradient with respect to `source`.

    by_value: row i of `source` and of `gradient` is of value i alone, so each may have a factor of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, gradient: Tensor | None, values: Tensor, by_value: bool = False
    ) -> Tensor:
        ctx.gradient, ctx.by_value = gradient, by_value
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        if _is_one(grad):
            return gradient, None, None, None
        factor = grad.unsqueeze(1) if ctx.by_value and not _is_repeated(grad) else _one_number(grad)
        return gradient.mul_(factor), None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total; a low-precision product is rounded to its own type first."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _is_one(grad: Tensor) -> bool:
    """Return whether every element is known to be 1; on a GPU always False, to avoid a device sync."""
    return grad.device.type == "cpu" and _is_repeated(grad) and grad.flatten()[0].item() == 1


def _is_repeated(grad: Tensor) -> bool:
    """Return whether all elements share one number in memory, as in the gradient of a sum."""
    varying = (size for size, stride in zip(grad.shape, grad.stride(), strict=True) if stride)
    return grad.numel() > 0 and all(size == 1 for size in varying)


def _one_number(grad: Tensor) -> Tensor:
    """Return the value that all elements share. Raises ValueError if they differ."""
    # The strides identify the gradient of a sum without a device sync.
    if not _is_repeated(grad) and bool((grad != grad.flatten()[0]).any()):
        raise ValueError("the losses of a chunked cross entropy may only be summed, with equal weights")
    return grad.flatten()[0]


def chunked_cross_entropy(
    hidden_states: Tensor,
    head: ChunkedHead,
    labels: Tensor,
    loss_mask: Tensor,
    shard: VocabularyShard,
    terms: LossTerms,
) -> Tensor:
    """Compute `vocab_parallel_cross_entropy` of the head's transformed hidden_states @ weight.T + bias, in chunks.

    Only the sum of the losses, times any number, may be differentiated, and only once: forward computes its gradients.
    Where weight and bias are frozen, each loss may have a factor of its own.
    The gradients of weight and bias are summed in at least float32. One small collective per chunk.
    hidden_states: [B, S, H], equal on every rank of tp; their gradient is partial, from this rank's rows only.
    """
    weight, bias = head.weight, head.bias
    loss = _ShardLoss.of(labels, loss_mask, shard, terms, hidden_states.dtype)
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    fp32 = loss.weights.dtype
    gradients = _Gradients(
        torch.empty_like(flat) if _differentiated(flat) else None,
        torch.zeros_like(weight, dtype=fp32) if _differentiated(weight) else None,
        torch.zeros_like(bias, dtype=fp32) if bias is not None and _differentiated(bias) else None,
    )
    losses = _in_chunks(flat, head, loss, gradients)
    total: Tensor = _KnownGradient.apply(flat, gradients.hidden_states, losses, True)  # type: ignore[no-untyped-call]
    for source, gradient in ((weight, gradients.weight), (bias, gradients.bias)):
        if source is not None:
            total = total + _KnownGradient.apply(source, gradient, torch.zeros_like(losses))  # type: ignore[no-untyped-call]
    return total.view(labels.shape)


def _differentiated(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad
