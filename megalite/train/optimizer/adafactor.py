"""Adafactor: a second moment of rows and columns instead of elements (Shazeer and Stern 2018, arXiv:1804.04235).

The formulas and constants are those of torch.optim.Adafactor: means instead of sums, epsilon where the moment is used,
decoupled weight decay, no first moment.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.collectives import all_reduce
from megalite.parallel.mesh import RankGroup
from megalite.topology.optimizers import COLUMN_MOMENT, ROW_MOMENT, VECTOR_MOMENT
from megalite.topology.state import state_parameter
from megalite.train.optimizer.rule import OptimizerParts, UpdateRule

# The second moment's decay is 1 - step ** _DECAY; an update's RMS is at most _CLIPPING.
_DECAY, _CLIPPING = -0.8, 1.0
# The least RMS of a weight that scales its learning rate, so that weights can leave zero.
_LEAST_SCALE = 1e-3


class Adafactor(UpdateRule):
    """Adafactor over weights that are split over ranks.

    Means over rows, columns and whole tensors are those of the canonical tensor, each part of a fused weight by itself,
    whatever the layout: the ranks add up their sums, in two collectives a step and axis. A step is the learning rate,
    at most 1 / sqrt(step), times the RMS of the tensor.
    """

    def __init__(self, parts: OptimizerParts):
        super().__init__(parts.groups(), {"lr": 0.0, "weight_decay": 0.0})
        self._sharding, self._mesh = parts.sharding, parts.mesh

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        parameter, mesh = self._sharding[weight], self._mesh
        keys = (ROW_MOMENT, COLUMN_MOMENT) if weight.dim() == 2 else (VECTOR_MOMENT,)
        shapes = {key: mesh.local_shape(state_parameter(parameter, key)) for key in keys}
        moments = {key: weight.detach().new_zeros(shape) for key, shape in shapes.items()}
        return {"step": torch.zeros((), dtype=torch.float32), **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient, and overwrite the gradients. Collective over the weights' axes."""
        slices = [part for group in self.param_groups for part in self._slices(group)]
        for part, sums in zip(slices, self._summed(slices, [part.sums() for part in slices]), strict=True):
            part.precondition(sums)
        squares = [part.gradient.square().sum().view(1) for part in slices]
        for part, square in zip(slices, self._summed(slices, squares), strict=True):
            part.update(square)

    def _slices(self, group: dict[str, Any]) -> Iterator["_Slice"]:
        mesh = self._mesh
        for weight in self.weights_with_gradients(group):
            state, parameter = self.state[weight], self._sharding[weight]
            state["step"] += 1
            assert weight.grad is not None
            row = 0
            for index, (part, _, values) in enumerate(mesh.parts_of(parameter, weight)):
                here = slice(row, row + values.shape[0])
                row = here.stop
                yield _Slice(
                    values,
                    weight.grad[here],
                    {key: state[key][here] for key in (ROW_MOMENT, VECTOR_MOMENT) if key in state},
                    state[COLUMN_MOMENT][index : index + 1] if COLUMN_MOMENT in state else None,
                    part.shape,
                    parameter.spec.dim if mesh.cut_over(parameter).size > 1 else None,
                    mesh.cut_over(parameter),
                    mesh.is_first_holder(parameter, part),
                    group["lr"],
                    group["weight_decay"],
                    float(state["step"]),
                )

    def _summed(self, slices: Sequence["_Slice"], sums: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of each slice over all slices of its tensor, in one collective an axis."""
        totals = [*sums]
        by_ranks: dict[RankGroup, list[int]] = {}
        for index, part in enumerate(slices):
            if part.dim is not None:
                by_ranks.setdefault(part.ranks, []).append(index)
        for ranks, split in by_ranks.items():
            flat = all_reduce(torch.cat([sums[index] * slices[index].counts for index in split]), ranks)
            for index, total in zip(split, flat.split([sums[index].numel() for index in split]), strict=True):
                totals[index] = total
        return totals


@dataclass
class _Slice:
    """This rank's slice of one canonical tensor in one update.

    held: the moment of the rows [rows, 1] of a matrix, or of the elements of a vector, as a view. columns: the moment
    of a matrix's columns [1, columns]. shape: of the whole tensor. dim: along which it is split over `ranks`; None: it
    is whole here. counts: the first rank of those that hold this slice; the gradient of the others is zero.
    """

    weight: Tensor
    gradient: Tensor
    held: Mapping[str, Tensor]
    columns: Tensor | None
    shape: tuple[int, ...]
    dim: int | None
    ranks: RankGroup
    counts: bool
    rate: float
    decay: float
    step: float
    scale: Tensor | None = None
    """The learning rate times the RMS of the tensor, once `precondition` knows it."""

    def sums(self) -> Tensor:
        """Return the sums over this slice that the whole tensor needs, flat; the moments that need none move on.

        First the squared weights; then, of a matrix split by rows, the moment of the rows and the squares of each
        column; of one split by columns, the squares of each row.
        """
        sums = [self.weight.square().sum().view(1)]
        if self.columns is None:
            self.held[VECTOR_MOMENT].lerp_(self.gradient.square(), self._new)
            return sums[0]
        rows, (height, width) = self.held[ROW_MOMENT], self.shape
        row_squares, column_squares = self._squares(1), self._squares(0)
        if self.dim == 1:
            sums.append(row_squares.view(-1))
        else:
            rows.lerp_(row_squares / width, self._new)
        if self.dim == 0:
            sums += [rows.sum().view(1), column_squares.view(-1)]
        else:
            self.columns.lerp_(column_squares / height, self._new)
        return torch.cat(sums)

    def precondition(self, sums: Tensor) -> None:
        """Divide the gradient by the root of its second moment. sums: those of `sums`, over the whole tensor."""
        eps = torch.finfo(self.weight.dtype).eps
        rms = (sums[0] / prod(self.shape)).sqrt()
        self.scale = rms.clamp(min=_LEAST_SCALE) * min(self.rate, 1 / sqrt(self.step))
        if self.columns is None:
            moment = self.held[VECTOR_MOMENT].clamp(min=eps**2)
        else:
            rows, (height, width) = self.held[ROW_MOMENT], self.shape
            if self.dim == 1:
                rows.lerp_(sums[1:].view_as(rows) / width, self._new)
            if self.dim == 0:
                self.columns.lerp_(sums[2:].view_as(self.columns) / height, self._new)
            mean = sums[1] / height if self.dim == 0 else rows.mean()
            moment = (rows @ self.columns).div_(mean.clamp(min=eps)).clamp_(min=eps**2)
        self.gradient.mul_(moment.rsqrt_())

    def update(self, square: Tensor) -> None:
        """Move the weight along the gradient. square: of the preconditioned gradient, over the whole tensor."""
        rms = (square[0] / prod(self.shape)).sqrt()
        self.weight.mul_(1 - self.rate * self.decay)
        assert self.scale is not None
        self.weight.sub_(self.gradient.mul_(self.scale / (rms / _CLIPPING).clamp(min=1.0)))

    @property
    def _new(self) -> float:
        """The share of this step in the second moment."""
        return float(self.step**_DECAY)

    def _squares(self, dim: int) -> Tensor:
        """Return the sum of the gradient's squares along `dim`, kept as a dim of size 1; makes no tensor of squares."""
        norms: Tensor = torch.linalg.vector_norm(self.gradient, dim=dim, keepdim=True)
        return norms.square_()


def make(parts: OptimizerParts) -> torch.optim.Optimizer:
    return Adafactor(parts)
