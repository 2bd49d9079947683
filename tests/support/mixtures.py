"""Experts on a few ranks, and a plain loop over tokens and experts in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalite.ops.activations import swiglu
from megalite.ops.expert_rows import RowOrder
from megalite.ops.router import route
from megalite.parallel import experts
from megalite.parallel.experts import expert_linear, through_experts
from megalite.parallel.experts import expert_mlp as mlp_of_products
from megalite.parallel.gradient_sums import BY_AUTOGRAD, WeightGradients
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.topology.axes import Layout
from megalite.topology.experts import ExpertShape
from megalite.topology.stages import balanced_split

HIDDEN, WIDTH = 6, 5
NAMES = ("output", "tokens", "logits", "gate and up", "down")


@dataclass(frozen=True)
class ExpertCase:
    """Tokens of each rank, their experts of `number`, and where they prefer to go.

    favourites: experts that all tokens prefer, over all others. avoided: experts to which no token goes.
    shared: a function of all tokens is computed beside. recomputed: all of it again in the backward.
    """

    tokens: tuple[int, ...]
    number: int = 7
    chosen: int = 2
    favourites: tuple[int, ...] = ()
    avoided: tuple[int, ...] = ()
    shared: bool = False
    recomputed: bool = False

    @property
    def shape(self) -> ExpertShape:
        # The weight of a single expert would be 1 after normalising, and its gradient noise.
        return ExpertShape(self.number, self.chosen, WIDTH, norm_topk_prob=self.chosen > 1)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the tokens of all ranks, their logits, both weights of all experts and the output's gradient."""
        total = sum(self.tokens)
        tokens, logits, gate_up, down, grad = (
            torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            for seed, size in enumerate(
                (
                    (total, HIDDEN),
                    (total, self.number),
                    (self.number * 2 * WIDTH, HIDDEN),
                    (self.number * HIDDEN, WIDTH),
                    (total, HIDDEN),
                )
            )
        )
        logits[:, list(self.favourites)] += 6
        logits[:, list(self.avoided)] -= 20
        return tokens, logits, gate_up, down, grad


def alone(case: ExpertCase) -> list[Tensor]:
    """Return the output of all tokens and all gradients, computed expert by expert with masks."""
    *inputs, grad = case.tensors()
    tokens, logits, gate_up, down = (tensor.requires_grad_() for tensor in inputs)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    chosen.scatter_(1, logits.topk(case.chosen).indices, True)
    if case.shape.norm_topk_prob:
        weights = logits.masked_fill(~chosen, -torch.inf).softmax(dim=1)
    else:
        weights = logits.softmax(dim=1) * chosen
    output = tokens.square() if case.shared else torch.zeros_like(tokens)
    for weight, wide, narrow in zip(
        weights.unbind(1), gate_up.chunk(case.number), down.chunk(case.number), strict=True
    ):
        gate, up = (tokens @ wide.t()).chunk(2, dim=1)
        output = output + weight.unsqueeze(1) * ((F.silu(gate) * up) @ narrow.t())
    return [output.detach(), *torch.autograd.grad(output, (tokens, logits, gate_up, down), grad)]


def of_rank(case: ExpertCase, ranks: RankGroup) -> list[Tensor]:
    """Return a rank's output and gradients: of its own tokens, and of the weights of its experts."""
    before = sum(case.tokens[: ranks.rank])
    own = slice(before, before + case.tokens[ranks.rank])
    local = balanced_split(case.number, ranks.size)[ranks.rank]
    tokens, logits, gate_up, down, grad = case.tensors()
    tokens, logits, grad = (tensor[own].clone() for tensor in (tokens, logits, grad))
    gate_up, down = (
        torch.cat([*stacked.chunk(case.number)][local.start : local.stop]) for stacked in (gate_up, down)
    )
    inputs = [tensor.requires_grad_() for tensor in (tokens, logits, gate_up, down)]
    compute = partial(_experts, gate_up=gate_up, down=down)
    beside = (lambda: tokens.square()) if case.shared else None

    def forward(tokens: Tensor, logits: Tensor) -> Tensor:
        return through_experts(tokens, route(logits, case.shape), ranks, compute, beside)

    again = partial(checkpoint, forward, use_reentrant=False)
    output = (again if case.recomputed else forward)(tokens, logits)
    assert not output._is_view()
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def expert_mlp(
    rows: Tensor,
    counts: Sequence[int],
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    gradients: WeightGradients = BY_AUTOGRAD,
) -> Tensor:
    """Return the outputs of the MLPs of experts with these stacked weights."""
    wide, narrow = (partial(expert_linear, weight=each, gradients=gradients) for each in (gate_up, down))
    return mlp_of_products(rows, counts, wide, narrow, activation)


def _experts(rows: Tensor, counts: Sequence[int], gate_up: Tensor, down: Tensor) -> Tensor:
    return expert_mlp(rows, counts, gate_up, down, swiglu)


def experts_on_rank(cases: Sequence[ExpertCase]) -> list[list[Tensor]]:
    """Return this rank's output and gradients in each case."""
    mesh = ParallelMesh.over_world(Layout(data=dist.get_world_size()))
    return [of_rank(case, mesh.batch) for case in cases]


def order_on_rank(case: ExpertCase) -> list[str]:
    """Return what happens on this rank, in order: exchanges of rows that start and end, and the work beside."""
    mesh, events = ParallelMesh.over_world(Layout(data=dist.get_world_size())), []
    exchange = dist.all_to_all_single

    def noted(*arguments: Any, **settings: Any) -> Any:
        work = exchange(*arguments, **settings)
        if work is None:
            return None
        events.append("start")
        waits = mock.Mock(wraps=work)
        waits.wait.side_effect = lambda: events.append("end") or work.wait()
        return waits

    def beside() -> Tensor:
        events.append("beside")
        shared = tokens.square()
        shared.register_hook(lambda _: events.append("beside, backward"))
        return shared

    tokens, logits, gate_up, down, _ = (tensor.requires_grad_() for tensor in case.tensors())
    local = balanced_split(case.number, mesh.batch.size)[mesh.batch.rank]
    own = (torch.cat([*each.chunk(case.number)][local.start : local.stop]) for each in (gate_up, down))
    compute = partial(_experts, **dict(zip(("gate_up", "down"), own, strict=True)))
    with mock.patch.object(dist, "all_to_all_single", noted):
        routing = route(logits, case.shape)
        output = through_experts(tokens, routing, mesh.batch, compute, beside)
        events.append("backward")
        output.sum().backward()
    return events


# --------------------------------------------------------------------------------------------------- planted faults


def _left_in_order(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda rows, *_orders: rows


def _of_another_choice(tokens_of_rows: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda rows, weights, order: tokens_of_rows(rows, weights.flip(1), order)


def _half_the_weights_gradient(tokens_of_rows: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda rows, weights, order: tokens_of_rows(rows, (weights + weights.detach()) / 2, order)


class _ForgetfulOrder(RowOrder):
    """The rows' places are taken for the order that made them: right only where a permutation is its own inverse."""

    @classmethod
    def of(cls, experts: Tensor, compiled: bool = False) -> RowOrder:
        order = experts.flatten().argsort(stable=True)
        return RowOrder(order // experts.shape[1], order.view_as(experts))


EXPERT_FAULTS: dict[str, dict[str, Callable[..., Any]]] = {
    "rows by rank, not by expert, after the exchange": {"reordered": _left_in_order},
    "weights of another choice": {"tokens_of_rows": _of_another_choice},
    "half the gradient of the weights": {"tokens_of_rows": _half_the_weights_gradient},
    "an order for its inverse": {"RowOrder": lambda _: _ForgetfulOrder},
}
"""Fault -> name in parallel/experts.py -> what makes its replacement of it."""


def faulty_on_rank(case: ExpertCase) -> list[list[Tensor]]:
    """Return this rank's output and gradients with each fault of EXPERT_FAULTS."""
    mesh, results = ParallelMesh.over_world(Layout(data=dist.get_world_size())), []
    for faults in EXPERT_FAULTS.values():
        changed = {name: change(getattr(experts, name)) for name, change in faults.items()}
        with mock.patch.multiple(experts, **changed):
            results.append(of_rank(case, mesh.batch))
    return results
