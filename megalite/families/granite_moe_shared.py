"""Granite's mixtures with an MLP for all tokens beside the experts."""

from dataclasses import replace

from megalite.families.granite_moe import FAMILY as GRANITE_MOE
from megalite.families.tensors import Fused

_NAMES = GRANITE_MOE.names
_DOWN = {"mlp.shared_experts.down_proj": "shared_mlp.output_linear"}

FAMILY = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    published="2025-02",
    keys={**GRANITE_MOE.keys, "shared_intermediate_size": "shared_intermediate_size"},
    names=replace(
        _NAMES,
        modules={**_NAMES.modules, **_DOWN},
        in_mixtures={**_NAMES.in_mixtures, **_DOWN},
        fusions=(
            Fused(
                "shared_mlp.input_linear",
                ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            ),
        ),
    ),
    presets={},
)
