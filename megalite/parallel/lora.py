"""Low-rank adapters of column- and row-parallel linears, in the linears' own collectives, and of experts.

Hu et al., "LoRA", 2021: W x + scale * B A x. Liu et al., "DoRA", 2024: that, times a trained magnitude of each row over
the row's norm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.ops.dropout import Mask, dropout
from megalite.parallel.collectives import all_reduce, column_input, row_output
from megalite.parallel.experts import expert_linear
from megalite.parallel.gradient_sums import BY_AUTOGRAD, WeightGradients, linear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.adapter import Lora
from megalite.topology.parameters import Parameter


def part_blocks(b: Tensor, parts: Sequence[tuple[int, bool]]) -> Tensor:
    """Return B [rows of adapted parts, rank] with a block of rows for each part of a fused weight.

    [rows, adapted parts * rank]: a block of columns for each adapted part. parts: rows of each, and whether it is
    adapted.
    """
    if len(parts) == 1:
        return b
    rows = iter(b.split([count for count, adapted in parts if adapted]))
    blocks: Tensor = torch.block_diag(
        *(next(rows) if adapted else b.new_empty(count, 0) for count, adapted in parts)
    )
    return blocks


@dataclass(frozen=True)
class LoraShare:
    """A rank's share of an adapter of one linear.

    a, b: A [adapted parts * rank, in] and B [rows of adapted parts, rank]. parts: the rows here of each part of the
    linear's weight, and whether it is adapted.
    """

    a: Parameter
    b: Parameter
    parts: tuple[tuple[int, bool], ...]


class _LowRank(nn.Module):
    """A [parts * rank, in] and B [rows, rank] of one linear on this rank; with DoRA magnitude [rows].

    forward takes a call that gives the linear's weight: DeepSpeed detaches the tensors that a module is called with, so
    that backward would keep the whole weight that ZeRO 3 has gathered.
    """

    def __init__(
        self,
        adapter: Lora,
        share: LoraShare,
        mesh: ParallelMesh,
        dtype: torch.dtype,
        gradients: WeightGradients = BY_AUTOGRAD,
    ):
        super().__init__()
        self.mesh, self.scale, self.parts, self.gradients = mesh, adapter.scale, share.parts, gradients
        a, b = mesh.local_shape(share.a), mesh.local_shape(share.b)
        self.A = nn.Parameter(torch.empty(a, dtype=dtype))
        self.B = nn.Parameter(torch.empty(b, dtype=dtype))
        self.magnitude = nn.Parameter(torch.empty(b[0], dtype=dtype)) if adapter.dora else None

    def _low(self, inputs: Tensor, mask: Mask | None) -> Tensor:
        """Return A x, [..., columns of B]; mask: dropout of x."""
        return linear(dropout(inputs, mask), self.A, None, self.gradients)

    def _add(self, output: Tensor, low: Tensor, b: Tensor) -> Tensor:
        """Return output [..., rows] + scale * low [..., columns of b] b^T."""
        rows = output.flatten(0, -2)
        return torch.addmm(rows, low.flatten(0, -2), b.t(), alpha=self.scale).view(output.shape)


def _squares(rows: Tensor) -> Tensor:
    """Return the squared L2 norm of each row, at least float32."""
    exact = torch.promote_types(rows.dtype, torch.float32)
    squares: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=exact).square()
    return squares


class ColumnLora(_LowRank):
    """The adapter of a linear whose outputs are split over tp.

    A is whole on every rank, B has the rank's rows. Without sequence parallelism the gradient of A x joins that of the
    linear's input before the one all-reduce; with it, only the columns of A x are gathered.
    """

    def forward(self, hidden_states: Tensor, weight: Callable[[], Tensor], mask: Mask | None) -> Tensor:
        """[B, S or S / tp, in] -> [B, S, this rank's rows]; mask: dropout of A's input."""
        inputs = column_input(hidden_states, self.mesh)
        if self.mesh.splits_sequence:
            low = column_input(self._low(hidden_states, mask), self.mesh)
        else:
            low = self._low(inputs, mask)
        b = part_blocks(self.B, self.parts)
        output = self._add(linear(inputs, weight(), None, self.gradients), low, b)
        if self.magnitude is not None:
            output = output * self._over_norm(self.magnitude, weight(), b)
        return output

    @torch.no_grad()
    def row_norms(self, weight: Tensor, b: Tensor) -> Tensor:
        """Return the L2 norm of each row of W + scale * B A: [rows of all parts]."""
        return _squares(weight + self.scale * (b @ self.A)).sqrt()

    def _over_norm(self, magnitude: Tensor, weight: Tensor, b: Tensor) -> Tensor:
        """Return the factor of each row: its magnitude over its norm; 1 where it is not adapted."""
        norms = self.row_norms(weight, b).split([count for count, _ in self.parts])
        trained = iter(magnitude.split([count for count, adapted in self.parts if adapted]))
        factors = [
            next(trained) / norm if adapted else torch.ones_like(norm)
            for norm, (_, adapted) in zip(norms, self.parts, strict=True)
        ]
        return torch.cat(factors).to(weight.dtype)

    @torch.no_grad()
    def set_magnitudes(self, weight: Tensor) -> None:
        """Start the magnitudes at the norms of the rows of W + scale * B A."""
        if self.magnitude is not None:
            norms = self.row_norms(weight, part_blocks(self.B, self.parts)).split(
                [count for count, _ in self.parts]
            )
            adapted = [each for each, (_, chosen) in zip(norms, self.parts, strict=True) if chosen]
            self.magnitude.copy_(torch.cat(adapted))


class RowLora(_LowRank):
    """The adapter of a linear whose inputs are split over tp: A has the rank's columns, B is whole.

    scale * B A x of the rank's inputs joins the linear's partial products before their one sum.
    """

    def forward(self, hidden_states: Tensor, weight: Callable[[], Tensor], mask: Mask | None) -> Tensor:
        """[B, S, in / tp] -> [B, S or S / tp, out]; mask: dropout of A's input."""
        low = self._low(hidden_states, mask)
        product = linear(hidden_states, weight(), None, self.gradients)
        summed = row_output(self._add(product, low, self.B), self.mesh)
        if self.magnitude is None:
            return summed
        return summed * (self.magnitude / self.row_norms(weight())).to(summed.dtype)

    @torch.no_grad()
    def row_norms(self, weight: Tensor) -> Tensor:
        """Return the L2 norm of each row of the whole W + scale * B A: [out]. Collective over tp."""
        squares = _squares(weight + self.scale * (self.B @ self.A))
        return all_reduce(squares, self.mesh.tp).sqrt()

    @torch.no_grad()
    def set_magnitudes(self, weight: Tensor) -> None:
        """Start the magnitudes at the norms of the rows of W + scale * B A. Collective over tp."""
        if self.magnitude is not None:
            self.magnitude.copy_(self.row_norms(weight))


class ExpertLora(_LowRank):
    """The adapters of the stacked matrices of n experts: A [n * adapted parts * rank, in], B [n * adapted rows, rank].

    All experts of a layer are adapted alike, and each has an A and a B for each of its adapted parts.
    """

    def add_to(self, product: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Add scale * B A x to the experts' own products [R, out], in place. rows: [R, in], sorted by expert."""
        low = self.scale * expert_linear(rows, counts, self.A, self.gradients)
        return product.add_(expert_linear(low, counts, self._blocks(len(counts)), self.gradients))

    def _blocks(self, experts: int) -> Tensor:
        """Return B with a block of columns for each adapted part of an expert, which has zeros for the other rows."""
        parts = self.parts[: len(self.parts) // experts]
        if len(parts) == 1:
            return self.B
        adapted = [place for place, (_, is_adapted) in enumerate(parts) if is_adapted]
        own = self.B.view(experts, len(adapted), parts[0][0], -1)
        blocks = own.new_zeros(experts, len(parts), own.shape[2], len(adapted), own.shape[3])
        for column, place in enumerate(adapted):
            blocks[:, place, :, column] = own[:, column]
        return blocks.view(experts * len(parts) * own.shape[2], -1)
