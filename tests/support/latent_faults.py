"""Faults of latent attention to plant, with the settings of a `Job` that show each. Most leave the loss as it is."""

from collections.abc import Callable, Mapping
from typing import Any

from megalite.model import latent_attention
from megalite.parallel import gradients
from megalite.topology.axes import Layout
from tests.support.context_faults import ContextFault

_TENSOR = {"layout": Layout(tensor=2)}
_SEQUENCE = {"layout": Layout(tensor=2), "sequence_parallel": True}


def _all_but(word: str) -> Callable[[Any], Any]:
    def of(is_partial: Any) -> Any:
        return lambda parameter, part, mesh: word not in part.name and is_partial(parameter, part, mesh)

    return of


def _scaled_alone(norm: Any) -> Any:
    return type("Scaled", (norm,), {"forward": lambda self, values: values * self.weight})


LATENT_FAULTS: Mapping[str, ContextFault] = {
    "rotated key of each tensor rank": ContextFault(
        latent_attention, "column_input", lambda _: lambda values, mesh: values, _TENSOR
    ),
    "latent projection of a rank's own positions": ContextFault(
        gradients, "is_partial", _all_but("kv_a_proj_with_mqa"), _SEQUENCE
    ),
    "latent norm of a rank's own positions": ContextFault(
        gradients, "is_partial", _all_but("q_a_layernorm"), _SEQUENCE
    ),
    "latent vectors without their norms": ContextFault(latent_attention, "Norm", _scaled_alone, _TENSOR),
}
