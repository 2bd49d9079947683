"""The feed-forward block of a mixture of experts: each token is sent to a few of many gated MLPs.

Shazeer et al. 2017, "Outrageously large neural networks". No token is dropped, and no expert has a capacity.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.model.context import StepContext
from megalite.model.dropout import LayerMasks
from megalite.model.mlp import GatedMLP
from megalite.model.options import ModelOptions
from megalite.model.recompute import recomputing
from megalite.ops.activations import clamped_swiglu
from megalite.ops.choice import COMPILED
from megalite.ops.router import RealTokens, Routing, balance_loss, route, sequence_counts, with_loss, z_loss
from megalite.parallel.collectives import all_reduce, column_input, gather_ranks, row_output
from megalite.parallel.experts import expert_mlp, own_experts, through_experts
from megalite.parallel.layers import ExpertLinear
from megalite.parallel.lora_bank import Selection
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.experts import ExpertShape, MixtureShape
from megalite.topology.stages import balanced_split


class _Experts(nn.Module):
    """The linears of a rank's experts."""

    def __init__(self, shape: MixtureShape, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        experts, hidden = shape.experts, shape.hidden_size
        assert experts is not None
        width = len(balanced_split(experts.moe_intermediate_size, mesh.etp.size)[mesh.etp.rank])
        linear = partial(
            ExpertLinear, dtype=options.dtype, gradients=options.weight_gradients, bias=experts.expert_bias
        )
        held = len(mesh.experts(shape))
        self.gate_up_proj = linear(held * 2 * width, hidden)
        # Ranks that share an expert have parts of its output, to which the bias belongs once.
        self.down_proj = linear(held * hidden, width, adds_bias=mesh.etp.rank == 0)


class Router(nn.Module):
    """Chooses the experts of each token. It computes in float32 at least, where few scores are equal.

    counts, losses: tokens [E] that this rank has sent to each expert, int64, and its parts of the sequences' router
    losses, [] float64, since they were last cleared; in training alone.
    """

    counts: Tensor
    losses: Tensor

    def __init__(self, shape: MixtureShape, experts: ExpertShape, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        self.mesh, self.experts, self.training_settings = mesh, experts, options.training
        number = experts.num_experts
        self.weight = nn.Parameter(torch.empty(number, shape.hidden_size, dtype=options.dtype))
        self.bias = nn.Parameter(torch.empty(number, dtype=options.dtype)) if experts.router_bias else None
        self.e_score_correction_bias: nn.Parameter | None = None
        if experts.correction_bias:
            bias = torch.empty(number, dtype=options.loss_dtype)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        self.register_buffer("counts", torch.zeros(number, dtype=torch.int64), persistent=False)
        self.register_buffer("losses", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, hidden_states: Tensor, scale: float | None, real: RealTokens | None = None) -> Routing:
        """Route the tokens [B, positions, H] of this rank.

        scale: the gradient of each sequence's router losses, which the weights' gradient brings; None: there are none.
        real: the tokens that losses and counts know; None: all.
        """
        kind = torch.promote_types(hidden_states.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(kind)
        logits = F.linear(hidden_states.to(kind), self.weight.to(kind), bias)
        routing = route(logits.flatten(0, 1), self.experts, self.e_score_correction_bias)
        if scale is None:
            return routing
        losses = self._losses(logits, routing, real)
        if not recomputing():
            if real is None:
                self.counts += routing.counts
            else:
                experts = routing.experts.view(*logits.shape[:2], -1)
                self.counts += sequence_counts(experts, len(self.counts), real.mask).sum(dim=0)
            if losses is not None:
                self.losses += losses.detach().sum()
        return (
            routing if losses is None else routing._replace(weights=with_loss(routing.weights, losses, scale))
        )

    def _losses(self, logits: Tensor, routing: Routing, real: RealTokens | None) -> Tensor | None:
        """Return this rank's part of each sequence's losses [B]; None where they have no weight."""
        rows, positions, experts = logits.shape
        balance, z = self.training_settings.router_balance, self.training_settings.router_z
        ranks = self.mesh.cp.size * (self.mesh.tp.size if self.mesh.splits_sequence else 1)
        length: int | Tensor = positions * ranks
        mask = losses = None
        if real is not None:
            mask, length = real.mask, real.lengths.clamp(min=1).to(logits.dtype)
        if balance:
            counts = sequence_counts(routing.experts.view(rows, positions, -1), experts, mask)
            # A sequence's counts are of all its tokens; the shares of a rank's tokens stay on it.
            if self.mesh.splits_sequence:
                counts = all_reduce(counts, self.mesh.tp)
            counts = all_reduce(counts, self.mesh.cp)
            shares = routing.shares.view(rows, positions, experts)
            if mask is not None:
                shares = shares * mask.unsqueeze(2).to(shares.dtype)
            losses = balance * balance_loss(shares, counts, self.experts.num_experts_per_tok, length)
        if z:
            spread = z * z_loss(logits, length, mask)
            losses = spread if losses is None else losses + spread
        return losses


class Mixture(nn.Module):
    """The sum of a token's experts, each times its weight, and of the shared experts.

    The experts of a layer are divided over `mesh.ep`. Where the ranks of tp share each expert, all of them send the
    same tokens, of all positions, and their outputs are parts of a sum.
    """

    def __init__(self, shape: MixtureShape, layer: int, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        experts = shape.experts
        assert experts is not None
        self.mesh, self.number, self.activation = mesh, experts.num_experts, options.ops.glu.swiglu
        if experts.swiglu_limit is not None:
            self.activation = partial(clamped_swiglu, limit=experts.swiglu_limit)
        self.own_experts = mesh.experts(shape)
        self.gathers_tokens = options.expert_dispatch == "all_gather" and mesh.ep.size > 1
        self.compiled_rows = options.ops.expert_rows == COMPILED
        self.gate = Router(shape, experts, mesh, options)
        self.experts = _Experts(shape, mesh, options)
        self.shared_experts: GatedMLP | None = None
        if experts.shared_intermediate_size:
            self.shared_experts = GatedMLP(shape.dense_layer(layer), mesh, options)

    def forward(self, hidden_states: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        if self.gathers_tokens:
            return self._on_gathered_tokens(hidden_states, context, masks)
        routing = self.gate(hidden_states, context.router_scale, context.real_tokens)
        rows = hidden_states
        if self.mesh.cuts_experts:
            routing, rows = self._of_all_positions(routing, hidden_states)
        shared = self.shared_experts
        beside = None
        if shared is not None and not self.mesh.cuts_experts:
            beside = lambda: shared(hidden_states, context, masks).flatten(0, 1)  # noqa: E731
        output = through_experts(
            rows.flatten(0, 1),
            routing,
            self.mesh.ep,
            partial(self._compute, context.adapters),
            beside,
            self.compiled_rows,
        )
        output = output.view(rows.shape)
        if self.mesh.cuts_experts:
            output = row_output(output, self.mesh)
            if shared is not None:
                output = output + shared(hidden_states, context, masks)
        return output

    def _on_gathered_tokens(self, hidden_states: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
        """Return what `forward` does where all ranks of tp have the same tokens, and the ranks of tp and cp together
        one copy of the experts. Two collectives at most, and a third one where ranks of cp share tokens."""
        tokens = context.gathered(hidden_states)
        routing = self.gate(tokens, None)
        parts = own_experts(
            tokens.flatten(0, 1), routing, self.own_experts, partial(self._compute, context.adapters)
        )
        output = context.own(all_reduce(all_reduce(parts, self.mesh.tp), self.mesh.cp).view_as(tokens))
        shared = self.shared_experts
        return output if shared is None else output + shared(hidden_states, context, masks)

    def _compute(self, adapters: Selection | None, rows: Tensor, counts: Sequence[int]) -> Tensor:
        linears = self.experts.gate_up_proj, self.experts.down_proj
        gate_up, down = (partial(each.product, adapters=adapters) for each in linears)
        return expert_mlp(rows, counts, gate_up, down, self.activation)

    def _of_all_positions(self, routing: Routing, hidden_states: Tensor) -> tuple[Routing, Tensor]:
        """Return the routing and hidden states of all positions, on every rank of tp; gradients are summed over tp."""
        rows, mesh = hidden_states.shape[:2], self.mesh
        weights = column_input(routing.weights.view(*rows, -1), mesh).flatten(0, 1)
        chosen = routing.experts
        if mesh.splits_sequence:
            chosen = gather_ranks(chosen.view(*rows, -1), mesh.tp).transpose(0, 1).flatten(0, 2)
        counts = sequence_counts(chosen.unsqueeze(0), self.number).squeeze(0)
        return routing._replace(experts=chosen, weights=weights, counts=counts), column_input(
            hidden_states, mesh
        )
