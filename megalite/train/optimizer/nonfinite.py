"""Names the tensor of an overflow where its gradient is gone when the overflow is found."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.parallel.gradients import first_nonfinite
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import Parameter


class FiniteFlags:
    """One flag a canonical tensor: whether all gradients of it that were seen in this step are finite.

    They stay on the device, and are read after an overflow only.
    """

    def __init__(self, parameters: Sequence[Parameter], mesh: ParallelMesh):
        self._parameters, self._mesh = parameters, mesh
        counts = [len(parameter.spec.parts) for parameter in parameters]
        # Allocated once: a small tensor that outlives a backward would split the heap between large ones.
        self._all = torch.ones(sum(counts), dtype=torch.bool, device=mesh.device)
        names = (parameter.name for parameter in parameters)
        self._flags = dict(zip(names, self._all.split(counts), strict=True))

    def see(self, parameter: Parameter, gradient: Tensor) -> None:
        flags = self._flags[parameter.name]
        for index, part in enumerate(gradient.detach().split(self._mesh.rows(parameter))):
            # One pass that allocates nothing of the gradient's size: both ends are NaN if an element is.
            flags[index] &= torch.stack(part.aminmax()).isfinite().all()

    def first_nonfinite(self) -> str | None:
        """As parallel.gradients.first_nonfinite of the gradients that were seen. Collective over the world."""
        seen = {parameter.name: _Seen(self._stand_in(parameter)) for parameter in self._parameters}
        return first_nonfinite(self._parameters, seen, self._mesh)  # type: ignore[arg-type]

    def clear(self) -> None:
        self._all.fill_(True)

    def _stand_in(self, parameter: Parameter) -> Tensor:
        """A gradient of as many rows, in which what is not finite is where it was."""
        flags = self._flags[parameter.name]
        values = torch.where(flags, 0.0, torch.inf)
        return values.repeat_interleave(torch.tensor(self._mesh.rows(parameter), device=flags.device))


@dataclass(frozen=True)
class _Seen:
    grad: Tensor
