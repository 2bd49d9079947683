"""Megatron-DeepSpeed's arguments and names, where they differ from Megatron-LM's. No torch."""

from dataclasses import replace
from typing import Any

from megalite.convert.deepspeed.pipeline_names import Dialect
from megalite.convert.megatron.arguments import Arguments, megatron_shape
from megalite.errors import CheckpointError
from megalite.families.registry import inexpressible
from megalite.topology.shape import ModelShape

_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
# Each changes the model or the order of its rows, and is not built here.
_OFF = ("force_ds_sequence_parallel", "num_experts_switch", "topk_linear", "use_tutel")

DIALECT = Dialect(
    program="Megatron-DeepSpeed",
    attention="self_attention",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    head="lm_head.weight",
)


def as_megatron(arguments: Arguments) -> Arguments:
    """Return the arguments in Megatron-LM's words. Raises CheckpointError for what changes the order of rows."""
    table: dict[str, Any] = dict(arguments.table)
    unsupported = [f"{name} = {table[name]!r}" for name in _OFF if table.get(name)]
    if table.get("ds_sequence_parallel_size") not in (None, 1):
        unsupported.append(f"ds_sequence_parallel_size = {table['ds_sequence_parallel_size']!r}")
    if unsupported:
        raise CheckpointError(f"{arguments.source}: megalite does not support {', '.join(unsupported)}")
    table["normalization"] = _NORMS.get(str(table.get("normalization")), table.get("normalization"))
    groups, heads = table.get("num_key_value_heads"), table.get("num_attention_heads")
    if groups is not None and groups != heads:
        table.update(group_query_attention=True, num_query_groups=groups)
    if table.get("num_experts") in ([1], 1):
        table["num_experts"] = None
    if table.get("rope_theta") is not None:
        table["rotary_base"] = table["rope_theta"]
    if table.get("onnx_safe"):
        table["bias_gelu_fusion"] = False  # its exact GELU is computed instead
    return replace(arguments, table=table)


def megatron_deepspeed_shape(arguments: Arguments, vocab_size: int) -> ModelShape:
    """Return the shape. Raises CheckpointError where the model is not built, or no family has it."""
    shape = megatron_shape(as_megatron(arguments), vocab_size)
    if lacking := [f"{name} = {value!r}" for name, value, _ in inexpressible(shape)]:
        raise CheckpointError(
            f"{arguments.source}: no model family of megalite has {', '.join(lacking)} together with the other"
            " settings; such a checkpoint cannot be imported"
        )
    return shape
