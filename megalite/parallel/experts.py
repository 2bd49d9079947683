"""The experts of a layer, spread over the expert-parallel ranks: rows go to the ranks of their experts and come back.

Each rank sorts its rows by expert, so that what it sends to a rank is one run of rows (the experts of a rank follow
each other). Arrived rows are in the order (rank, expert); the products want (expert, rank). Experts and ranks without
rows take part with empty tensors: each rank makes the same collectives, and each weight has a gradient.

An exchange is two autograd nodes, one that starts it and one that waits. Work between the two, the MLP that all tokens
share, runs while rows are under way; in the backward the second node starts and the first one waits.

Without training no rows travel: ranks that have the same tokens compute their own experts of them and sum the outputs.
A decode step has a few rows an expert, for which one all-reduce is cheaper than counts, rows out and rows back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.launcher.control.progress import progress
from megalite.ops.expert_products import expert_products
from megalite.ops.expert_rows import RowOrder, inverse, rows_of_tokens, tokens_of_rows
from megalite.ops.router import Routing
from megalite.parallel.collectives import Pending
from megalite.parallel.context import reordered
from megalite.parallel.gradient_sums import BY_AUTOGRAD, WeightGradients
from megalite.parallel.mesh import RankGroup
from megalite.topology.stages import balanced_split

ExpertCompute = Callable[[Tensor, Sequence[int]], Tensor]
"""The experts of this rank: (rows [R, H] sorted by expert, the rows of each expert) -> [R, H]."""


def through_experts(
    tokens: Tensor,
    routing: Routing,
    ranks: RankGroup,
    compute: ExpertCompute,
    beside: Callable[[], Tensor] | None = None,
    compiled: bool = False,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts: [T, H] -> [T, H]. Collective over `ranks`.

    Rank r has balanced_split(experts, ranks.size)[r] of them. beside: what all tokens go through, [T, H], run while
    rows are under way and added to the result. compiled: see RowOrder.
    The host waits for the device once, for the counts of rows.
    """
    order = RowOrder.of(routing.experts, compiled)
    if ranks.size == 1:
        shared = beside() if beside else None
        done = compute(rows_of_tokens(tokens, order), routing.counts.tolist())
    else:
        plan = _plan(routing.counts, ranks)
        exchange = _Exchange(ranks, plan.sent, plan.received)
        # No name for the rows that leave: they are freed once they are sent.
        arriving = exchange.start(rows_of_tokens(tokens, order))
        shared = beside() if beside else None
        arrived = reordered(exchange.wait(arriving), plan.order, plan.inverse)
        del arriving
        done = reordered(compute(arrived, plan.counts), plan.inverse, plan.order)
        exchange = _Exchange(ranks, plan.received, plan.sent)
        done = exchange.wait(exchange.start(done))
    output = tokens_of_rows(done, routing.weights, order)
    return output if shared is None else output + shared


def own_experts(tokens: Tensor, routing: Routing, experts: range, compute: ExpertCompute) -> Tensor:
    """Return the part of this rank's `experts` in what `through_experts` returns: [T, H] -> [T, H]; no collective.

    Ranks with the same tokens, whose experts are all of them together, sum their parts. Outside autograd.
    """
    order, counts = RowOrder.of(routing.experts), routing.counts.tolist()
    own = counts[experts.start : experts.stop]
    begin = sum(counts[: experts.start])
    end = begin + sum(own)
    done = compute(tokens.index_select(0, order.tokens[begin:end]), own)
    # The rows of other ranks' experts are one row of zeros here.
    done = torch.cat((done, done.new_zeros(1, done.shape[1])))
    rows = torch.where((order.rows >= begin) & (order.rows < end), order.rows - begin, end - begin)
    return tokens_of_rows(done, routing.weights, RowOrder(order.tokens, rows))


def expert_mlp(
    rows: Tensor,
    counts: Sequence[int],
    gate_up: ExpertCompute,
    down: ExpertCompute,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the outputs of n gated MLPs, each for its rows: [R, H] sorted by expert -> [R, H].

    gate_up: products with the gate of each expert over its up, [R, H] -> [R, 2F]. activation: [R, 2F] -> [R, F].
    down: [R, F] -> [R, H].
    """
    return down(activation(gate_up(rows, counts)), counts)


class _ExpertLinear(torch.autograd.Function):
    """Products with the stacked weights of experts, whose gradients follow the rules of `WeightGradients`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: Sequence[int], gradients: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        # A recomputed region gives back saved tensors without their gradients.
        ctx.parameter, ctx.counts, ctx.gradients = weight, counts, gradients
        return expert_products(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        grad, counts = grad.contiguous(), ctx.counts
        for_rows, for_weight, *_ = ctx.needs_input_grad
        return (
            expert_products(grad, weight, counts, transposed=True) if for_rows else None,
            ctx.gradients.of_product(ctx.parameter, grad, lambda: rows, counts) if for_weight else None,
            None,
            None,
        )


def expert_linear(
    rows: Tensor, counts: Sequence[int], weight: Tensor, gradients: WeightGradients = BY_AUTOGRAD
) -> Tensor:
    """Return rows W_e^T of each of n experts e: [R, in] sorted by expert -> [R, out]. weight: [n * out, in]."""
    products: Tensor = _ExpertLinear.apply(rows, weight, counts, gradients)  # type: ignore[no-untyped-call]
    return products


@dataclass(frozen=True)
class _Plan:
    """Which rows travel. sent, received: the rows to and from each rank. counts: the arrived rows of each expert.

    order: [R] int64, from (rank, expert) to (expert, rank).
    """

    sent: list[int]
    received: list[int]
    counts: list[int]
    order: Tensor
    inverse: Tensor


def _plan(counts: Tensor, ranks: RankGroup) -> _Plan:
    """Exchange the counts [E] of the ranks' rows. The only place where the host waits."""
    number = len(counts)
    experts = [len(experts) for experts in balanced_split(number, ranks.size)]
    own = experts[ranks.rank]
    of_ranks = counts.new_empty(ranks.size * own)
    with progress.collective("all_to_all", ranks.role):
        dist.all_to_all_single(of_ranks, counts, [own] * ranks.size, experts, group=ranks.group)
    known: list[int] = torch.cat((counts, of_ranks)).tolist()
    ends = [0, *accumulate(experts)]
    sent = [sum(known[begin:end]) for begin, end in pairwise(ends)]
    by_rank = [known[begin : begin + own] for begin in range(number, len(known), own)]
    received = [sum(rows) for rows in by_rank]
    expert = torch.arange(own, device=counts.device).repeat(ranks.size)
    order = expert.repeat_interleave(of_ranks, output_size=sum(received)).argsort(stable=True)
    return _Plan(sent, received, [sum(rows) for rows in zip(*by_rank, strict=True)], order, inverse(order))


@dataclass
class _Exchange:
    """Rows to the ranks of a group and from them, once: sent and received rows of each rank."""

    ranks: RankGroup
    sent: list[int]
    received: list[int]
    pending: Pending | None = field(default=None, repr=False)

    def start(self, rows: Tensor) -> Tensor:
        """Return the rows that will arrive [sum(received), H], whose values are there after `wait`."""
        arriving: Tensor = _Start.apply(rows, self)  # type: ignore[no-untyped-call]
        return arriving

    def wait(self, arriving: Tensor) -> Tensor:
        arrived: Tensor = _Wait.apply(arriving, self)  # type: ignore[no-untyped-call]
        return arrived

    def begin(self, rows: Tensor, *, back: bool = False) -> Tensor:
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        rows = rows.contiguous()
        arriving = rows.new_empty(sum(received), *rows.shape[1:])
        progress.collective("all_to_all", self.ranks.role)
        work = dist.all_to_all_single(arriving, rows, received, sent, group=self.ranks.group, async_op=True)

        def finish(_: Tensor = rows) -> Tensor:  # the collective reads it until then
            with progress.wait(self.ranks.role):
                work.wait()
            return arriving

        self.pending = finish
        return arriving

    def end(self) -> Tensor:
        assert self.pending is not None
        finish, self.pending = self.pending, None
        return finish()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: _Exchange) -> Tensor:
        ctx.mark_dirty(arriving)
        ctx.exchange = exchange
        exchange.end()
        return arriving

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.begin(grad, back=True)
        # `_Start` returns the gradient that arrives; its shape is another than that of these rows.
        return grad, None
