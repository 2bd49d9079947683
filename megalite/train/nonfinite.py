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
        self._flags: dict[str, Tensor] = {}

    def see(self, parameter: Parameter, gradient: Tensor) -> None:
        parts = gradient.detach().split(self._rows(parameter))
        flags = torch.stack([part.isfinite().all() for part in parts])
        before = self._flags.get(parameter.name)
        self._flags[parameter.name] = flags if before is None else flags & before

    def first_nonfinite(self) -> str | None:
        """As parallel.gradients.first_nonfinite of the gradients that were seen. Collective over the world."""
        seen = {
            parameter.name: _Seen(self._stand_in(parameter))
            for parameter in self._parameters
            if parameter.name in self._flags
        }
        held = [parameter for parameter in self._parameters if parameter.name in seen]
        return first_nonfinite(held, seen, self._mesh)  # type: ignore[arg-type]

    def clear(self) -> None:
        self._flags.clear()

    def _rows(self, parameter: Parameter) -> list[int]:
        regions = parameter.spec.slices(self._mesh.tp.rank, self._mesh.tp.size)
        return [region.shape[0] for _, region in regions]

    def _stand_in(self, parameter: Parameter) -> Tensor:
        """A gradient of as many rows, in which what is not finite is where it was."""
        flags = self._flags[parameter.name]
        values = torch.where(flags, 0.0, torch.inf)
        return values.repeat_interleave(torch.tensor(self._rows(parameter), device=flags.device))


@dataclass(frozen=True)
class _Seen:
    grad: Tensor
