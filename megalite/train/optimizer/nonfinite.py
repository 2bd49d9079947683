"""Names the tensor of an overflow where its gradient is gone when the overflow is found."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megalite.parallel.gradients import first_nonfinite
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import Parameter
from megalite.train.optimizer.flat_range import part_bounds


class FiniteFlags:
    """One flag a canonical tensor: whether all gradients of it that were seen in this step are finite.

    They stay on the device, and are read after an overflow only.
    """

    def __init__(self, parameters: Sequence[Parameter], mesh: ParallelMesh):
        self._parameters, self._mesh = parameters, mesh
        counts = [len(parameter.spec.parts) for parameter in parameters]
        # Allocated once: a small tensor that outlives a backward would split the heap between large ones.
        self._flags = torch.ones(sum(counts), dtype=torch.bool, device=mesh.device)
        places = pairwise(accumulate(counts, initial=0))
        self._places = {each.name: slice(*place) for each, place in zip(parameters, places, strict=True)}
        # Where each tensor ends in the flattened parameter.
        self._bounds = {each.name: part_bounds(each, mesh) for each in parameters}
        self._ends: dict[torch.dtype, Tensor] = {}
        """The lowest and the highest gradient of each tensor in this backward, by dtype of the gradient: [2, tensors].

        Both are NaN if an element is.
        """

    def see(self, parameter: Parameter, gradient: Tensor, start: int = 0) -> None:
        """Note a gradient, or its flat range from `start`: one pass a tensor that writes two numbers."""
        dtype, flags = gradient.dtype, self._flags
        if dtype not in self._ends:
            self._ends[dtype] = torch.zeros(2, len(flags), dtype=dtype, device=flags.device)
        low, high = self._ends[dtype][:, self._places[parameter.name]]
        flat = gradient.detach().flatten()
        for index, (begin, end) in enumerate(pairwise(self._bounds[parameter.name])):
            part = flat[max(begin - start, 0) : max(end - start, 0)]
            if part.numel():
                torch.aminmax(part, out=(low[index], high[index]))

    def backward_ends(self) -> None:
        """Keep what was seen, before another backward brings its gradients."""
        for ends in self._ends.values():
            self._flags &= ends.isfinite().all(dim=0)

    def first_nonfinite(self) -> str | None:
        """As parallel.gradients.first_nonfinite of the gradients that were seen. Collective over the world."""
        self.backward_ends()
        seen = {parameter.name: _Seen(self._stand_in(parameter)) for parameter in self._parameters}
        return first_nonfinite(self._parameters, seen, self._mesh)  # type: ignore[arg-type]

    def clear(self) -> None:
        self._flags.fill_(True)
        for ends in self._ends.values():
            ends.zero_()

    def _stand_in(self, parameter: Parameter) -> Tensor:
        """A gradient of as many rows, in which what is not finite is where it was."""
        flags = self._flags[self._places[parameter.name]]
        values = torch.where(flags, 0.0, torch.inf)
        return values.repeat_interleave(torch.tensor(self._mesh.rows(parameter), device=flags.device))


@dataclass(frozen=True)
class _Seen:
    grad: Tensor
