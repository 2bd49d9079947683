"""The numbers of parameters of a model: all, trained, and active for one token."""

from dataclasses import dataclass

from megalite.topology.flops import active_numel
from megalite.topology.parameters import model_parameters
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class ParameterCount:
    """total: every value of the model with its adapter. trained: updated.

    active: those that one token meets: of a mixture the experts that it is sent to, and all else, the tables too.
    """

    total: int
    trained: int
    active: int

    @classmethod
    def of(cls, shape: ModelShape) -> "ParameterCount":
        parameters = model_parameters(shape)
        return cls(
            sum(parameter.numel for parameter in parameters),
            sum(parameter.numel for parameter in parameters if parameter.trained),
            sum(active_numel(parameter, shape) for parameter in parameters),
        )
