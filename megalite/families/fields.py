"""The fields of a shape in one table: a mixture's experts beside the decoder's, by the names of their settings."""

from dataclasses import MISSING, fields
from typing import Any

from megalite.topology.experts import ExpertShape, MixtureShape
from megalite.topology.shape import ModelShape

_NOT_TRAINED = ("shared_gate", "router_bias", "expert_bias")
EXPERT_SETTINGS = {
    field.name: {"correction_bias": "router_correction_bias"}.get(field.name, field.name)
    for field in fields(ExpertShape)
    if field.name not in _NOT_TRAINED
}
"""Field of ExpertShape -> its name as a setting of [model]."""
DEFAULTS: dict[str, Any] = {
    **{field.name: field.default for field in fields(ModelShape) if field.default is not MISSING},
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


def shape_fields(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a shape whose attention is trained here; experts as `expert_fields` has them."""
    experts = shape.experts if isinstance(shape, MixtureShape) else None
    return {field.name: getattr(shape, field.name) for field in fields(ModelShape)} | expert_fields(experts)
