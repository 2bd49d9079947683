"""Megatron-LM's arguments of the model as settings of [model], by the same reading as those of a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.config.sections.shape_settings import as_settings
from megalite.convert.adopt.megatron.experts import expert_problems, experts_of, has_experts, layer_pattern
from megalite.convert.adopt.rules import Reading, number, text, whole
from megalite.convert.megatron.arguments import Arguments, megatron_shape, not_built
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES, inexpressible
from megalite.topology.experts import MixtureShape
from megalite.topology.shape import ModelShape

_BIASES = ("attention_bias", "attention_output_bias", "mlp_bias")
# argument -> (its type, the settings of [model] that it decides, with others)
_VALUES: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "num_layers": (whole, ("num_hidden_layers",)),
    "hidden_size": (whole, ("hidden_size",)),
    "ffn_hidden_size": (whole, ("intermediate_size",)),
    "num_attention_heads": (whole, ("num_attention_heads",)),
    "num_query_groups": (whole, ("num_key_value_heads",)),
    "num_key_value_heads": (whole, ("num_key_value_heads",)),
    "kv_channels": (whole, ("head_dim",)),
    "max_position_embeddings": (whole, ("max_position_embeddings",)),
    "position_embedding_type": (text, ("position_embedding",)),
    "rotary_base": (number, ("rope_theta",)),
    "rotary_percent": (number, ("partial_rotary_factor",)),
    "rotary_seq_len_interpolation_factor": (whole, ("rope_type", "rope_factor")),
    "rope_scaling_factor": (number, ("rope_factor",)),
    "normalization": (text, ("norm",)),
    "norm_epsilon": (number, ("rms_norm_eps",)),
    "init_method_std": (number, ("initializer_range",)),
    "window_size": (text, ("sliding_window",)),
    "num_experts": (whole, ("num_experts",)),
    "moe_router_topk": (whole, ("num_experts_per_tok",)),
    "moe_ffn_hidden_size": (whole, ("moe_intermediate_size",)),
    "moe_shared_expert_intermediate_size": (whole, ("shared_intermediate_size",)),
    "moe_layer_freq": (layer_pattern, ("mlp_only_layers",)),
    "moe_router_score_function": (text, ("router_scores", "norm_topk_prob")),
    "moe_router_topk_scaling_factor": (number, ("routed_scaling_factor",)),
    "moe_router_num_groups": (whole, ("n_group",)),
    "moe_router_group_topk": (whole, ("topk_group",)),
}
_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "group_query_attention": ("num_key_value_heads",),
    "use_rotary_position_embeddings": ("position_embedding",),
    "use_rope_scaling": ("rope_type",),
    "swiglu": ("gated_mlp", "hidden_act"),
    "openai_gelu": ("hidden_act",),
    "no_bias_gelu_fusion": ("hidden_act",),
    "disable_bias_linear": _BIASES,
    "add_qkv_bias": ("attention_bias",),
    "qk_layernorm": ("qk_norm",),
    "untie_embeddings_and_output_weights": ("tie_word_embeddings",),
    "no_position_embedding": ("position_embedding",),
    "moe_router_pre_softmax": ("norm_topk_prob",),
    "moe_router_enable_expert_bias": ("router_correction_bias",),
}
MODEL_ARGUMENTS = tuple(name.replace("_", "-") for name in (*_VALUES, *_SWITCHES))
_WORDS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "rotary": "rope"}
"""Words of Megatron-DeepSpeed and bigscience for those of Megatron-LM."""
_DEFAULTS = (
    "family",
    "num_key_value_heads",
    "intermediate_size",
    "position_embedding",
    "norm",
    *_BIASES,
    "gated_mlp",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
)
_EXPERT_DEFAULTS = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


def answer_model(reading: Reading) -> None:
    """Answer every argument of the model, and set what the others leave at Megatron-LM's defaults."""
    table, wrong = _table(reading)
    for key, reason in wrong.items():
        reading.refuse(key, reason, "correct it")
    for unsupported in not_built(Arguments({**table, "rotary_percent": 1.0, "num_experts": None}, Path())):
        name = unsupported.partition(" = ")[0]
        reading.refuse(
            name.replace("_", "-"), f"megalite does not build {unsupported}", "choose another model"
        )
        table.pop(name, None)
    if "num_experts" in table:
        for name, reason, remedy in expert_problems(reading, table):
            reading.refuse(name.replace("_", "-"), reason, remedy)
            table.pop(name, None)
    try:
        shape = _shape(table)
    except (CheckpointError, ArithmeticError) as error:
        message = str(error).partition(": ")[2] or str(error)
        for key in MODEL_ARGUMENTS:
            if reading.has(key):
                reading.refuse(key, f"the model is incomplete or not built: {message}", "complete [model]")
        reading.account.note(f"the model could not be read: {message}")
        return
    settings = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in as_settings(vars(shape)).items()
        if value is not None
    }
    for name, (_, decided) in _VALUES.items():
        _take(reading, name, {f"model.{each}": settings[each] for each in decided if each in settings})
    for name, decided in _SWITCHES.items():
        _take(reading, name, {f"model.{each}": settings[each] for each in decided if each in settings})
    mixture = isinstance(shape, MixtureShape)
    if mixture and any(inexpressible(shape)):
        reading.account.default("checkpoint.export", False, "no family's files can say this mixture")
    for name in _DEFAULTS + (_EXPERT_DEFAULTS if mixture else ()):
        reason = (
            "the first family whose files can say this model" if name == "family" else "Megatron-LM's default"
        )
        reading.account.default(f"model.{name}", settings[name], reason)


def _take(reading: Reading, name: str, settings: dict[str, Any]) -> None:
    key = name.replace("_", "-")
    grouped = reading.is_on("group-query-attention")
    if name == "num_query_groups" and not grouped:
        reading.no_effect(key, "--group-query-attention is off")
    elif name.startswith(("moe_", "num_experts")) and not settings:
        reading.no_effect(
            key, "it belongs to --num-experts" if name != "num_experts" else "the layers are dense"
        )
    elif name.startswith("rotary_") and settings.get("model.position_embedding") == "learned":
        reading.no_effect(key, "positions are learned")
    else:
        reading.take(key, settings)


def _table(reading: Reading) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments as a checkpoint of Megatron-LM has them, and key -> reason of unusable ones."""
    table: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for name, (parse, _) in _VALUES.items():
        key = name.replace("_", "-")
        if reading.has(key):
            try:
                value = parse(reading.get(key))
                table[name] = _WORDS.get(value, value) if isinstance(value, str) else value
            except ValueError as error:
                wrong[key] = str(error)
    for name in _SWITCHES:
        if reading.is_on(name.replace("_", "-")):
            table[name] = True
    if not has_experts(reading):
        table.pop("num_experts", None)
    if "num_key_value_heads" in table:  # Megatron-DeepSpeed's, which needs no switch
        table |= {"num_query_groups": table.pop("num_key_value_heads"), "group_query_attention": True}
    if "window_size" in table:
        numbers = str(table["window_size"]).strip("()'\" ").split(",")
        table["window_size"] = tuple(
            int(part) if part.strip().lstrip("-").isdecimal() else part for part in numbers
        )
    if table.pop("no_bias_gelu_fusion", False):
        table["bias_gelu_fusion"] = False
    rotary = table.get("position_embedding_type") == "rope" or "use_rotary_position_embeddings" in table
    if table.pop("no_position_embedding", False) and not rotary:
        wrong["no-position-embedding"] = "the model would have no positions at all"
    return table, wrong


def _shape(table: dict[str, Any]) -> ModelShape:
    """Return the shape of the arguments. Raises CheckpointError."""
    partial = table.pop("rotary_percent", 1.0)
    arguments = Arguments(table, Path("the script"))
    if "ffn_hidden_size" not in table:
        hidden = arguments.whole("hidden_size")
        # Megatron-LM keeps the parameters of a gated MLP near those of 4 * hidden, in multiples of 64.
        gated = int(4 * hidden * 2 / 3 / 64) * 64
        table["ffn_hidden_size"] = gated if "swiglu" in table else 4 * hidden
    experts = {name: table.pop(name) for name in [*table] if name.startswith(("moe_", "num_experts"))}
    shape = megatron_shape(arguments, vocab_size=1 << 17)
    if "num_experts" in experts:
        shape = MixtureShape(**vars(shape), experts=experts_of(table | experts))
    elif partial == 1.0 or shape.position_embedding != "rope":
        return shape
    if shape.position_embedding == "rope":
        shape = replace(shape, partial_rotary_factor=partial)
    families = (replace(shape, family=family) for family in FAMILIES)
    unsaid = replace(shape, family="mixtral") if "num_experts" in experts else shape
    return next((option for option in families if not any(inexpressible(option))), unsaid)
