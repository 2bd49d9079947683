"""The settings of [adapter]."""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field

from megalite.config.sections.section import Count, Fraction, Lenient, Section, Text
from megalite.topology.adapter import PROJECTIONS, Adapter, Lora, LoraBias, Prefix


class AdapterConfig(Section):
    """A few trained weights beside the frozen ones of model.weights."""

    kind: Literal["none", "lora", "prefix"] = Field(
        "none",
        description='"lora": updates of low rank; "prefix": virtual tokens; "none": all weights are trained',
    )
    path: Text | None = Field(
        None, description="PEFT folder of an adapter to start from; its settings count where none are given"
    )
    rank: Count = Field(16, description="lora: rank of the update of each linear")
    alpha: float = Field(32.0, gt=0, description="lora: the update is multiplied by alpha / rank")
    dropout: Fraction = Field(0.0, description="lora: dropout probability of what the adapter reads")
    targets: Annotated[tuple[Text, ...], Lenient] | Literal["all"] = Field(
        "all", description='lora: adapted linears, as in ["q_proj", "*.3.mlp.up_proj"]; "all": every one'
    )
    modules_to_save: Annotated[tuple[Text, ...], Lenient] = Field(
        (), description='lora: modules that are trained whole beside the adapter, as in ["lm_head"]'
    )
    bias: LoraBias = Field(
        "none", description='lora: trained biases: none, all, or those of the adapted linears ("lora_only")'
    )
    rslora: bool = Field(False, description="lora: multiply by alpha / sqrt(rank) instead (rsLoRA)")
    dora: bool = Field(
        False, description="lora: train the magnitude of each row apart from its direction (DoRA)"
    )
    tokens: Count = Field(20, description="prefix: number of virtual tokens in front of each sequence")
    projection: Count | None = Field(
        None, description="prefix: hidden width of an MLP that computes the prefix; default: no MLP"
    )


SETTINGS_OF = {
    "lora": (*(field.name for field in fields(Lora)), "dropout"),
    "prefix": tuple(field.name for field in fields(Prefix)),
}
"""Kind of adapter -> the settings that only it has."""


def described_adapter(adapter: AdapterConfig) -> Adapter | None:
    """Return the adapter as the model's shape has it; None: there is none."""
    if adapter.kind == "none":
        return None
    kind = Prefix if adapter.kind == "prefix" else Lora
    settings: dict[str, Any] = {field.name: getattr(adapter, field.name) for field in fields(kind)}
    if settings.get("targets") == "all":
        settings["targets"] = PROJECTIONS
    return kind(**settings)
