"""Norms of gradients, weights and updates by module and parameter group: the same numbers in every layout."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megalite.ops.choice import PLAIN_TORCH, Operators
from megalite.parallel.gradients import squared_norm_shares
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameter_groups import ParameterGroup, group_of
from megalite.topology.parameters import Parameter, model_parameters, module_of
from megalite.topology.shape import ModelShape
from megalite.train.optimizer.flat_range import FlatRange, part_bounds

_GRADIENT, _WEIGHT, _UPDATE = range(3)
# Module and pattern of the group, None for the default group.
_Cell = tuple[str, str | None]


class UpdateNorms:
    """The squared norms of one update, this rank's shares, until `totals` sums them over all ranks.

    Every element of a trained parameter counts once: replicated weights on the first tensor-parallel rank, heads that
    ranks share on their first holder, tied weights on their first stage, copies of data-parallel ranks divided.
    Weights are masters before the update; gradients have neither loss scale nor clipping.
    """

    def __init__(
        self,
        shape: ModelShape,
        groups: Sequence[ParameterGroup],
        mesh: ParallelMesh,
        *,
        ops: Operators = PLAIN_TORCH,
    ):
        self._groups, self._mesh, self._ops = groups, mesh, ops
        # The cells of the whole model, in the same order on every rank.
        cells = dict.fromkeys(self._cell(each) for each in model_parameters(shape) if each.trained)
        self._cells = {cell: index for index, cell in enumerate(cells)}
        self._shares = torch.zeros(3, len(cells), dtype=torch.float64, device=mesh.device)

    def see_gradients(self, ranges: Iterable[FlatRange], tensors: Mapping[str, Tensor], scale: float) -> None:
        """Record the gradients of whole shards. tensors: name -> parameter; scale: the factor on its gradient."""
        pairs = ((each, tensors[each.parameter.name].grad) for each in ranges)
        self._add(_GRADIENT, ((each, gradient) for each, gradient in pairs if gradient is not None))
        self.scale_gradients(1 / scale)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the recorded gradients."""
        self._shares[_GRADIENT] *= factor**2

    def step_by_module(self, optimizer: torch.optim.Optimizer, ranges: Sequence[FlatRange]) -> None:
        """Call optimizer.step() for the tensors of one module after the other, so that one module is copied at a time.

        Collective where the optimizer's step is.
        """
        modules = dict.fromkeys(module_of(each.parameter) for each in ranges)
        whole = [group["params"] for group in optimizer.param_groups]
        try:
            for module in modules:
                own = [each for each in ranges if module_of(each.parameter) == module]
                tensors = {id(each.flat) for each in own}
                for group, members in zip(optimizer.param_groups, whole, strict=True):
                    group["params"] = [tensor for tensor in members if id(tensor) in tensors]
                with self.watch(optimizer, own):
                    optimizer.step()
        finally:
            for group, members in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = members

    @contextmanager
    def watch(
        self, optimizer: torch.optim.Optimizer, ranges: Iterable[FlatRange], *, gradients: bool = False
    ) -> Iterator[None]:
        """Record what each optimizer.step() inside of the `with` block does to its tensors, which it copies.

        gradients: whether their gradients are recorded too.
        """
        inside: dict[int, list[FlatRange]] = {}
        for flat_range in ranges:
            inside.setdefault(id(flat_range.flat), []).append(flat_range)
        before: dict[int, Tensor] = {}

        def tensors(stepped: torch.optim.Optimizer) -> Iterator[tuple[Tensor, list[FlatRange]]]:
            for group in stepped.param_groups:
                yield from ((tensor, inside.get(id(tensor), [])) for tensor in group["params"])

        @torch.no_grad()
        def begin(stepped: torch.optim.Optimizer, *_: Any) -> None:
            for tensor, own in tensors(stepped):
                before[id(tensor)] = tensor.detach().clone()
                self._add(_WEIGHT, ((each, tensor) for each in own))
                if gradients and tensor.grad is not None:
                    gradient = tensor.grad
                    self._add(_GRADIENT, ((each, gradient) for each in own))

        @torch.no_grad()
        def end(stepped: torch.optim.Optimizer, *_: Any) -> None:
            for tensor, own in tensors(stepped):
                update = before.pop(id(tensor)).sub_(tensor)
                self._add(_UPDATE, ((each, update) for each in own))

        hooks = optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def totals(self) -> dict[str, float]:
        """Return the norms under their names in metrics.jsonl. Collective; the host waits for the update.

        An update ratio is nan where all weights are 0.
        """
        table = self._mesh.reduce_over_world(self._shares).T.tolist()
        modules, patterns = zip(*self._cells, strict=True)
        groups = [[pattern or "default" for pattern in patterns]] if self._groups else []
        sums: dict[str, list[float]] = {}
        for names in (modules, *groups, ["model"] * len(table)):
            for name, squares in zip(names, table, strict=True):
                sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * 3), squares, strict=True)]
        norms: dict[str, float] = {}
        for name, squares in sums.items():
            gradient, weight, update = map(math.sqrt, squares)
            norms[f"grad_norm/{name}"], norms[f"weight_norm/{name}"] = gradient, weight
            norms[f"update_ratio/{name}"] = update / weight if weight else math.nan
        return norms

    def _cell(self, parameter: Parameter) -> _Cell:
        group = group_of(parameter, self._groups)
        return module_of(parameter), None if group is None else group.pattern

    def _add(self, row: int, ranges: Iterable[tuple[FlatRange, Tensor]]) -> None:
        """Add the squares of tensors laid out as the ranges' `flat`."""
        counted = (
            (self._cells[self._cell(flat_range.parameter)], flat_range.copies, values)
            for flat_range, tensor in ranges
            for values in self._counted(flat_range, tensor)
        )
        device = self._mesh.device
        self._shares[row] += squared_norm_shares(counted, len(self._cells), device, ops=self._ops)

    def _counted(self, flat_range: FlatRange, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the elements of a range that this rank counts."""
        parameter, mesh = flat_range.parameter, self._mesh
        if not mesh.is_first_stage(parameter):
            return
        values = flat_range.of(tensor.reshape(-1))
        bounds = [each - flat_range.start for each in part_bounds(parameter, mesh)]
        for part, (begin, end) in zip(parameter.spec.parts, pairwise(bounds), strict=True):
            elements = values[max(begin, 0) : max(end, 0)]
            if mesh.is_first_holder(parameter, part) and elements.numel():
                yield elements
