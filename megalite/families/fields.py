"""The fields of a shape in one table: experts and latent attention beside the decoder's, by their settings' names."""

from dataclasses import MISSING, fields
from typing import Any

from megalite.topology.experts import ExpertShape, LatentAttention, MixtureShape
from megalite.topology.shape import ModelShape

_NOT_TRAINED = ("shared_gate",)
EXPERT_SETTINGS = {
    field.name: {"correction_bias": "router_correction_bias"}.get(field.name, field.name)
    for field in fields(ExpertShape)
    if field.name not in _NOT_TRAINED
}
"""Field of ExpertShape -> its name as a setting of [model]."""
LATENT_SETTINGS = tuple(field.name for field in fields(LatentAttention))
"""The fields of LatentAttention, which are settings of [model]; None without latent attention."""
DEFAULTS: dict[str, Any] = {
    **{field.name: field.default for field in fields(ModelShape) if field.default is not MISSING},
    **dict.fromkeys(LATENT_SETTINGS),
    "num_experts": 0,
    **{
        EXPERT_SETTINGS[field.name]: field.default
        for field in fields(ExpertShape)
        if field.name in EXPERT_SETTINGS and field.default is not MISSING
    },
}
"""The value of a field that neither a run nor its family sets."""


def expert_fields(experts: ExpertShape | None) -> dict[str, Any]:
    """Return the settings that say a mixture's experts; of a dense model num_experts = 0."""
    if experts is None:
        return {"num_experts": 0}
    return {setting: getattr(experts, name) for name, setting in EXPERT_SETTINGS.items()}


def latent_fields(latent: LatentAttention | None) -> dict[str, Any]:
    """Return the settings that say latent attention; all None where there is none."""
    return {name: getattr(latent, name, None) for name in LATENT_SETTINGS}


def shape_fields(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a shape; experts and latent attention as `expert_fields` and `latent_fields` have them."""
    own = {field.name: getattr(shape, field.name) for field in fields(ModelShape)}
    experts, latent = (shape.experts, shape.latent) if isinstance(shape, MixtureShape) else (None, None)
    return own | latent_fields(latent) | expert_fields(experts)
