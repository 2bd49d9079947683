"""Linears and embeddings split over the tensor-parallel axis (Shoeybi et al., "Megatron-LM", 2019, section 3).

Beside them the linears of experts, whose rows `parallel/experts.py` brings.

With sequence parallelism inputs and outputs hold each rank's own S / tp positions.

Weights are allocated, not filled: model/stages.py fills them by name, so that every layout starts with equal weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.ops.dropout import Mask
from megalite.ops.expert_products import with_expert_biases
from megalite.parallel.collectives import (
    Pending,
    column_input,
    row_output,
    start_all_reduce,
    start_gather,
    start_reduce_scatter,
)
from megalite.parallel.experts import expert_linear
from megalite.parallel.gradient_sums import (
    BY_AUTOGRAD,
    WeightGradients,
    deferring,
    embedding,
    linear,
    product_gradients,
)
from megalite.parallel.lora import ColumnLora, ExpertLora, RowLora
from megalite.parallel.lora_bank import LoraBank, Selection
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.stages import balanced_split


class _OverlappedColumnLinear(torch.autograd.Function):
    """A linear whose backward overlaps the reduction of the input gradient over tp with the weight-gradient product.

    With sequence parallelism it saves only this rank's positions, and gathers the others again while the gradient of
    the input is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mesh: ParallelMesh,
        gradients: WeightGradients,
    ) -> Tensor:
        ctx.save_for_backward(hidden_states, weight)
        # A recomputed region gives back saved tensors without their gradients.
        ctx.mesh, ctx.parameter, ctx.gradients = mesh, weight, gradients
        inputs = start_gather(hidden_states, mesh.tp)() if mesh.splits_sequence else hidden_states
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden_states, weight = ctx.saved_tensors
        tp, split = ctx.mesh.tp, ctx.mesh.splits_sequence
        for_inputs, for_weight, for_bias, *_ = ctx.needs_input_grad
        inputs = _all_positions(hidden_states, ctx.mesh) if for_weight else None
        summing = (
            (start_reduce_scatter if split else start_all_reduce)(grad @ weight, tp) if for_inputs else None
        )
        flat_grad = grad.flatten(0, -2)
        weight_grad = None
        if inputs:
            weight_grad = ctx.gradients.of_product(ctx.parameter, flat_grad, lambda: inputs().flatten(0, -2))
        bias_grad = flat_grad.sum(dim=0) if for_bias else None
        return summing() if summing is not None else None, weight_grad, bias_grad, None, None


def _all_positions(hidden_states: Tensor, mesh: ParallelMesh) -> Pending:
    """Return a call that gives all positions, which starts to gather them if their product is not for later."""
    if not mesh.splits_sequence:
        return lambda: hidden_states
    if deferring():
        return lambda: start_gather(hidden_states, mesh.tp)()
    return start_gather(hidden_states, mesh.tp)


def column_linear(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mesh: ParallelMesh,
    gradients: WeightGradients = BY_AUTOGRAD,
) -> Tensor:
    """Compute a linear whose outputs are split over tp: [B, S or S / tp, in] -> [B, S, this rank's outputs]."""
    if mesh.tp.size == 1 or not torch.is_grad_enabled():
        return linear(column_input(hidden_states, mesh), weight, bias, gradients)
    output: Tensor = _OverlappedColumnLinear.apply(  # type: ignore[no-untyped-call]
        hidden_states, weight, bias, mesh, gradients
    )
    return output


class _ParallelLinear(nn.Module):
    """The weight [this rank's outputs, its inputs] of a linear that is split over tp, and the bias of its outputs."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        mesh: ParallelMesh,
        dtype: torch.dtype,
        bias: bool = False,
        gradients: WeightGradients = BY_AUTOGRAD,
    ):
        super().__init__()
        self.mesh, self.gradients = mesh, gradients
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None
        self.lora: ColumnLora | RowLora | None = None
        self.bank: LoraBank | None = None


class ColumnParallelLinear(_ParallelLinear):
    """Y = X W^T with the output features split over tp.

    weight: [this rank's output features, in_features], bias: [this rank's output features]; fused outputs
    (query-key-value, gate-up) are split part by part. X must be equal on every rank of tp, or split by positions;
    Y stays split, for a RowParallelLinear to consume.
    """

    def forward(
        self,
        hidden_states: Tensor,
        mask: Mask | None = None,
        adapters: Selection | None = None,
        *,
        with_bias: bool = True,
    ) -> Tensor:
        """Map [B, S or S / tp, in] to [B, S, out / tp].

        mask: dropout of the adapter's input. adapters: those of the tokens, from the bank; None: the linear's own.
        with_bias: False if the caller adds the bias.
        """
        bias = self.bias if with_bias else None
        if self.lora is not None and adapters is None:
            adapted: Tensor = self.lora(hidden_states, lambda: self.weight, mask)
            return adapted if bias is None else adapted + bias
        product = column_linear(hidden_states, self.weight, bias, mesh=self.mesh, gradients=self.gradients)
        if self.bank is None or adapters is None:
            return product
        return self.bank.add_to(product, hidden_states, adapters)


# Most chunks of a row-parallel product: the collectives of all but the last run beside the next chunk's product.
_CHUNKS = 4
# The fewest tokens of a chunk: with 4096 features they are 128 tiles of 128 x 256, one wave of an H100's 132
# multiprocessors, and 8 MiB in bf16: an estimate, no card has timed it.
_CHUNK_TOKENS = 1024


def chunks_per_sequence(inputs: Tensor, mesh: ParallelMesh) -> int:
    """Return the chunks of each sequence in a row-parallel product of [B, S, in]; 0: one product of all tokens."""
    if mesh.tp.size == 1 or inputs.device.type == "cpu" or torch.compiler.is_compiling():
        return 0  # gloo's threads would take the cores from the product
    sequences, length, _ = inputs.shape
    chunks = min(max(_CHUNKS // sequences, 1), length // _CHUNK_TOKENS)
    return chunks if sequences * chunks > 1 else 0


class _ChunkedRowLinear(torch.autograd.Function):
    """A row-parallel linear whose forward sums each chunk of tokens over tp while it multiplies the next one.

    After Wang et al., "Overlap communication with dependent computation via decomposition", 2023.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, mesh: ParallelMesh, gradients: WeightGradients, chunks: int
    ) -> Tensor:
        ctx.save_for_backward(inputs if weight.requires_grad else None, weight)
        # As in _OverlappedColumnLinear.
        ctx.mesh, ctx.parameter, ctx.gradients = mesh, weight, gradients
        # A chunk holds the same part of every rank's positions, so its sums are a range of each rank's output.
        by_rank = inputs.unflatten(1, (mesh.tp.size if mesh.splits_sequence else 1, -1))
        output = inputs.new_empty(len(inputs), by_rank.shape[2], len(weight))
        # bmm reads a part of each rank's positions where it lies, and one weight for all.
        weights, pending = weight.t().expand(by_rank.shape[1], -1, -1), []
        for sequence, summed in zip(by_rank, output.unsqueeze(1), strict=True):
            parts = zip(sequence.tensor_split(chunks, 1), summed.tensor_split(chunks, 1), strict=True)
            for part, sums in parts:
                if mesh.splits_sequence:
                    product = torch.bmm(part, weights).view(1, -1, len(weight))
                    pending.append(start_reduce_scatter(product, mesh.tp, sums))
                else:
                    pending.append(start_all_reduce(torch.bmm(part, weights, out=sums), mesh.tp))
        for finish in pending:
            finish()
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if ctx.mesh.splits_sequence:
            grad = start_gather(grad, ctx.mesh.tp)()
        return *product_gradients(ctx, grad), None, None, None


def row_linear(
    inputs: Tensor, weight: Tensor, *, mesh: ParallelMesh, gradients: WeightGradients = BY_AUTOGRAD
) -> Tensor:
    """Compute a linear whose inputs are split over tp: [B, S, this rank's inputs] -> [B, S or S / tp, out]."""
    chunks = chunks_per_sequence(inputs, mesh)
    if not chunks:
        return row_output(linear(inputs, weight, gradients=gradients), mesh)
    output: Tensor = _ChunkedRowLinear.apply(inputs, weight, mesh, gradients, chunks)  # type: ignore[no-untyped-call]
    return output


class RowParallelLinear(_ParallelLinear):
    """Y = X W^T with the input features split over tp; the partial products are summed.

    Y is equal on every rank of tp, or split by positions.

    weight: [out_features, this rank's input features]; bias: [out_features], replicated.
    """

    def forward(
        self, hidden_states: Tensor, mask: Mask | None = None, adapters: Selection | None = None
    ) -> Tensor:
        """Map [B, S, in / tp] to [B, S or S / tp, out]; mask, adapters: as of ColumnParallelLinear."""
        if self.lora is not None and adapters is None:
            summed: Tensor = self.lora(hidden_states, lambda: self.weight, mask)
        elif self.bank is not None and adapters is not None:
            product = linear(hidden_states, self.weight, gradients=self.gradients)
            summed = row_output(self.bank.add_to(product, hidden_states, adapters), self.mesh)
        else:
            summed = row_linear(hidden_states, self.weight, mesh=self.mesh, gradients=self.gradients)
        # After the reduction, so that the replicated bias counts once.
        return summed if self.bias is None else summed.add_(self.bias)


class ExpertLinear(nn.Module):
    """Y_e = X_e W_e^T + b_e of each expert e of this rank.

    weight: [n * out, in], the experts' matrices stacked. bias: [n * out]; adds_bias: False: another rank adds it.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        dtype: torch.dtype,
        gradients: WeightGradients = BY_AUTOGRAD,
        bias: bool = False,
        adds_bias: bool = True,
    ):
        super().__init__()
        self.gradients, self.adds_bias = gradients, adds_bias
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype)) if bias else None
        self.lora: ExpertLora | None = None

    # No forward: ZeRO 3 gathers the weights around the mixture, and would again around a module that is called.
    def product(self, rows: Tensor, counts: Sequence[int], adapters: Selection | None = None) -> Tensor:
        """Map [R, in], sorted by expert, to [R, out]; counts: the rows of each expert.

        adapters: None: the linear's own.
        """
        product = expert_linear(rows, counts, self.weight, self.gradients)
        if self.bias is not None:
            product = with_expert_biases(product, self.bias, counts, added=self.adds_bias)
        if self.lora is None or adapters is not None:
            return product
        return self.lora.add_to(product, rows, counts)


class VocabParallelEmbedding(nn.Module):
    """An embedding table with its rows (the vocabulary) split over tp, unevenly if tp does not divide the vocabulary.

    weight: [this rank's rows, hidden_size]. Tokens of other ranks' rows give zero, and the sum over tp completes them.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        mesh: ParallelMesh,
        dtype: torch.dtype,
        gradients: WeightGradients = BY_AUTOGRAD,
    ):
        super().__init__()
        self.mesh, self.gradients = mesh, gradients
        self.rows = balanced_split(vocab_size, mesh.tp.size)[mesh.tp.rank]
        self.weight = nn.Parameter(torch.empty(len(self.rows), hidden_size, dtype=dtype))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed input_ids [B, S] as [B, S or S / tp, hidden_size]."""
        if self.mesh.tp.size == 1:
            return embedding(input_ids, self.weight, self.gradients)
        elsewhere = (input_ids < self.rows.start) | (input_ids >= self.rows.stop)
        local_ids = (input_ids - self.rows.start).masked_fill(elsewhere, 0)
        embedded = embedding(local_ids, self.weight, self.gradients)
        embedded = embedded.masked_fill(elsewhere.unsqueeze(-1), 0)
        return row_output(embedded, self.mesh)
