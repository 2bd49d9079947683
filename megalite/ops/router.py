"""The router of a mixture of experts: which experts a token goes to, with which weights, and the losses that keep the
load even.

Sources: Shazeer et al. 2017, "Outrageously large neural networks"; Fedus et al. 2021, "Switch Transformers" (balance
loss); Zoph et al. 2022, "ST-MoE" (z-loss); DeepSeek-AI 2024, "DeepSeek-V3" (groups, sigmoid, loss per sequence).

The losses are those of single sequences, in parts: each rank's part of its own tokens, whose sum over the ranks of a
sequence is the sequence's loss. So no layout and no micro batch changes them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.topology.experts import ExpertShape

# Added to sums of sigmoids, which may all underflow, as DeepSeek-V3 does.
_SMALLEST_SUM = 1e-20


class Routing(NamedTuple):
    """Where T tokens go.

    experts: [T, k] int64, the best first. weights: [T, k] of their outputs, of the type of the logits.
    shares: [T, E], all scores divided by their sum; softmax scores as they are. counts: [E] int64, tokens per expert.
    """

    experts: Tensor
    weights: Tensor
    shares: Tensor
    counts: Tensor


class RealTokens(NamedTuple):
    """Which positions hold a token; the others are padding, which no count and no loss knows.

    mask: [B, tokens of this rank] bool. lengths: [B] int64, the tokens of whole sequences.
    """

    mask: Tensor
    lengths: Tensor


def route(logits: Tensor, shape: ExpertShape, correction: Tensor | None = None) -> Routing:
    """Choose the experts of each token; of equal scores the lower expert, on any device.

    logits: [T, E], at least float32. correction: [E], added to the scores for the choice only. The host waits for
    nothing.
    """
    sigmoid = shape.router_scores == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(dim=-1)
    ranking = scores.detach() if correction is None else scores.detach() + correction.detach()
    if shape.topk_group < shape.n_group:
        ranking = _within_best_groups(ranking, shape)
    experts = _best(ranking, shape.num_experts_per_tok)
    weights = scores.gather(1, experts)
    if shape.norm_topk_prob:
        weights = _normalised(weights, sigmoid)
    if shape.routed_scaling_factor != 1:
        weights = weights * shape.routed_scaling_factor
    shares = _normalised(scores, True) if sigmoid else scores
    counts = sequence_counts(experts.unsqueeze(0), shape.num_experts).squeeze(0)
    return Routing(experts, weights, shares, counts)


def _best(scores: Tensor, number: int) -> Tensor:
    """Return the places of the highest scores of each row, descending. `topk` promises no order of equal ones."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :number]


def _within_best_groups(ranking: Tensor, shape: ExpertShape) -> Tensor:
    """Return the scores [T, E] with -inf outside of each token's best groups: corrected scores may be below 0."""
    by_group = ranking.unflatten(1, (shape.n_group, -1))
    if shape.router_scores == "sigmoid":
        of_groups = by_group.topk(min(2, by_group.shape[2])).values.sum(dim=-1)
    else:
        of_groups = by_group.amax(dim=-1)
    left_out = torch.ones_like(of_groups, dtype=torch.bool)
    left_out.scatter_(1, _best(of_groups, shape.topk_group), False)
    return by_group.masked_fill(left_out.unsqueeze(2), -torch.inf).flatten(1)


def _normalised(scores: Tensor, may_vanish: bool) -> Tensor:
    total = scores.sum(dim=-1, keepdim=True)
    return scores / (total + _SMALLEST_SUM if may_vanish else total)


def sequence_counts(experts: Tensor, number: int, tokens: Tensor | None = None) -> Tensor:
    """Return how many tokens of each sequence go to each of `number` experts: [B, S, k] -> [B, E] int64.

    tokens: [B, S] bool, those that count; None: all.
    """
    chosen = experts.flatten(1)
    counts = chosen.new_zeros(len(chosen), number)
    if tokens is None:
        return counts.scatter_add_(1, chosen, torch.ones_like(chosen))
    return counts.scatter_add_(1, chosen, tokens.unsqueeze(2).expand_as(experts).flatten(1).to(chosen.dtype))


def balance_loss(shares: Tensor, counts: Tensor, chosen: int, length: int | Tensor) -> Tensor:
    """Return this rank's part of the balance loss of each sequence, [B]; 1 in all where the load is even.

    E / (k S) * sum over experts of count * mean over the sequence of share (DeepSeek-V3, equations 17 to 20).
    shares: [B, tokens of this rank, E], zeros for padding. counts: [B, E] int64, of whole sequences. chosen: k.
    length: S, or the tokens of each sequence [B] of the type of the shares.
    """
    sums = shares.sum(dim=1)
    return (sums * counts.to(sums.dtype)).sum(dim=-1) * (counts.shape[1] / (chosen * length**2))


def z_loss(logits: Tensor, length: int | Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return this rank's part of the mean over each sequence of logsumexp^2, [B].

    logits: [B, tokens of this rank, E]. length: as of `balance_loss`. tokens: as of `sequence_counts`.
    """
    squares = logits.logsumexp(dim=-1).square()
    return (squares if tokens is None else squares * tokens.to(squares.dtype)).sum(dim=1) / length


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, weights: float | Tensor) -> Tensor:
        ctx.mark_dirty(output)  # a tensor that is returned as it came would be a view
        ctx.weights = torch.as_tensor(weights, dtype=loss.dtype, device=loss.device).expand_as(loss)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.weights, None


def with_loss(output: Tensor, loss: Tensor, weights: float | Tensor) -> Tensor:
    """Return `output`, whose backward gives each element of `loss` the gradient `weights` too.

    So a block's own loss trains through whichever schedule runs its backward. loss: [B]. weights: a number, or [B].
    The result is never a view: a split backward detaches a chunk's output in place.
    """
    if not (torch.is_grad_enabled() and loss.requires_grad):
        return output
    attached: Tensor = _WithLoss.apply(output.clone() if output._is_view() else output, loss, weights)
    return attached
