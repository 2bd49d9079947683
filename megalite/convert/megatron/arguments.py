"""Megatron-LM's command-line arguments, as a checkpoint holds them, as the model's shape. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES, inexpressible
from megalite.topology.shape import ModelShape, RopeScaling

_LARGEST = 1 << 24
# Each changes the model where it is on, and is not built here.
_OFF = (
    "activation_func_clamp_value",
    "apply_layernorm_1p",
    "apply_residual_connection_post_layernorm",
    "attention_output_gate",
    "embed_layernorm",
    "experimental_attention_variant",
    "glu_activation",
    "glu_linear_offset",
    "heterogeneous_layers_config_encoded_json",
    "heterogeneous_layers_config_path",
    "hybrid_attention_ratio",
    "hybrid_layer_pattern",
    "hybrid_mlp_ratio",
    "hybrid_override_pattern",
    "is_hybrid_model",
    "mtp_num_layers",
    "multi_latent_attention",
    "no_rope_freq",
    "num_experts",
    "qk_l2_norm",
    "quick_geglu",
    "retro_add_retriever",
    "rotary_interleaved",
    "scale_normalization",
    "squared_relu",
    "use_mup",
    "window_attn_skip_freq",
)
# argument -> the values that leave the model as it is built here; absent is one of them.
_EXACT: dict[str, tuple[Any, ...]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "position_embedding_type": ("learned_absolute", "rope"),
    "rotary_percent": (1.0,),
    "softmax_type": ("vanilla",),
}
_OF_MIXTURES = (
    "write a mixture as Hugging Face files with Megatron-Bridge, and name their folder in model.weights"
)
# The arguments that `convert inspect` prints first.
OF_INTEREST = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "untie_embeddings_and_output_weights",
    "vocab_size",
    "padded_vocab_size",
    "tokenizer_type",
    "consumed_train_samples",
)


@dataclass(frozen=True)
class Arguments:
    """The table of them, with the file that it was read from; a wrong kind of value raises CheckpointError."""

    table: Mapping[str, Any]
    source: Path

    def whole(self, name: str, default: int | None = None) -> int:
        """A number above 0."""
        value = self.table.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST:
            raise self.problem(f"{name} = {value!r}, which is no size")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.table.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.problem(f"{name} = {value!r}, which is no number above 0")
        return float(value)

    def is_on(self, name: str, default: bool = False) -> bool:
        value = self.table.get(name, default)
        if not isinstance(value, bool | None):
            raise self.problem(f"{name} = {value!r}, which is neither True nor False")
        return bool(value)

    def problem(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: its args have {text}")


def not_built(arguments: Arguments) -> Iterator[str]:
    """Every argument that makes another model of it than can be built here, as `name = value`."""
    table = arguments.table
    for name in _OFF:
        if table.get(name) not in (None, False, 0, ""):
            yield f"{name} = {table[name]!r}"
    for name, allowed in _EXACT.items():
        if table.get(name, allowed[0]) is not None and table.get(name, allowed[0]) not in allowed:
            yield f"{name} = {table[name]!r}"
    if not (_is_rotary(arguments) or arguments.is_on("add_position_embedding", True)):
        yield "add_position_embedding = False"
    if arguments.is_on("qk_layernorm") and table.get("normalization", "LayerNorm") != "RMSNorm":
        yield "qk_layernorm = True with normalization = LayerNorm"
    if arguments.is_on("use_rope_scaling") and table.get("rotary_seq_len_interpolation_factor") not in (
        None,
        1,
    ):
        yield "use_rope_scaling = True beside rotary_seq_len_interpolation_factor"
    window = table.get("window_size")
    if window is not None and not _is_pair(window):
        yield f"window_size = {window!r}"
    elif window is not None and window[0] >= 0 and window[1] != 0:
        yield f"window_size = {window!r}, which attends to later tokens"


def megatron_shape(arguments: Arguments, vocab_size: int) -> ModelShape:
    """The shape, of the first family whose files can say it; raises CheckpointError where it is not built."""
    if unsupported := list(not_built(arguments)):
        # Megatron-DeepSpeed has a list, and no converter.
        remedy = f"; {_OF_MIXTURES}" if isinstance(arguments.table.get("num_experts"), int) else ""
        raise CheckpointError(
            f"{arguments.source}: megalite does not support {', '.join(unsupported)}{remedy}"
        )
    hidden, heads = arguments.whole("hidden_size"), arguments.whole("num_attention_heads")
    grouped, rotary = arguments.is_on("group_query_attention"), _is_rotary(arguments)
    groups = arguments.whole("num_query_groups", heads) if grouped else heads
    if heads % groups:
        raise arguments.problem(f"{groups} query groups for {heads} heads")
    biases = arguments.is_on("add_bias_linear", True) and not arguments.is_on("disable_bias_linear")
    shape = ModelShape(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=arguments.whole("ffn_hidden_size", 4 * hidden),
        num_hidden_layers=arguments.whole("num_layers"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=arguments.whole("kv_channels", hidden // heads),
        max_position_embeddings=arguments.whole("max_position_embeddings"),
        rms_norm_eps=arguments.number("norm_epsilon", arguments.number("layernorm_epsilon", 1e-5)),
        tie_word_embeddings=not arguments.is_on("untie_embeddings_and_output_weights"),
        initializer_range=arguments.number("init_method_std", 0.02),
        position_embedding="rope" if rotary else "learned",
        norm="rms_norm" if arguments.table.get("normalization") == "RMSNorm" else "layer_norm",
        attention_bias=biases or arguments.is_on("add_qkv_bias"),
        attention_output_bias=biases,
        mlp_bias=biases,
        gated_mlp=arguments.is_on("swiglu"),
        hidden_act=_activation(arguments, biases),
        qk_norm="head" if arguments.is_on("qk_layernorm") else None,
        sliding_window=_window(arguments.table.get("window_size")),
    )
    if rotary:
        theta = arguments.number("rotary_base", 10000.0)
        shape = replace(shape, rope_theta=theta, rope_scaling=_rope_scaling(arguments))
    as_families = (replace(shape, family=family) for family in FAMILIES)
    return next((each for each in as_families if not any(inexpressible(each))), shape)


def true_vocab_size(arguments: Arguments, rows: int, asked: int | None) -> int:
    """Return how many of the table's rows are tokens. asked: by the user. Raises CheckpointError if nothing says it."""
    known = asked if asked is not None else _said_vocab_size(arguments, rows)
    if known is None:
        raise CheckpointError(
            f"{arguments.source}: the vocabulary was padded to {rows} rows, and its args lack the size before;"
            f" give the tokenizer's size with --vocab-size ({rows} keeps them all)"
        )
    if not 0 < known <= rows:
        raise CheckpointError(
            f"{arguments.source}: its table has {rows} rows, but --vocab-size or its args give {known} tokens;"
            f" set --vocab-size to {rows} or less"
        )
    return known


def _said_vocab_size(arguments: Arguments, rows: int) -> int | None:
    table = arguments.table
    if table.get("vocab_size") is not None:
        # Megatron-LM's tokenizer of mere numbers adds its end of document.
        return arguments.whole("vocab_size") + (table.get("tokenizer_type") == "NullTokenizer")
    divisor = table.get("make_vocab_size_divisible_by")
    return rows if divisor == 1 and table.get("tensor_model_parallel_size") == 1 else None


def _is_rotary(arguments: Arguments) -> bool:
    kind = arguments.table.get("position_embedding_type")
    # The older flag turned the newer setting, whose default is learned_absolute, into rope.
    return kind == "rope" or arguments.is_on("use_rotary_position_embeddings")


def _activation(arguments: Arguments, biases: bool) -> Literal["silu", "gelu", "gelu_pytorch_tanh"]:
    if arguments.is_on("swiglu"):
        return "silu"
    # The kernel that adds the bias too computes the approximation by tanh; without it the exact one is computed.
    fused = arguments.is_on("bias_gelu_fusion", True) and biases
    return "gelu_pytorch_tanh" if fused or arguments.is_on("openai_gelu") else "gelu"


def _rope_scaling(arguments: Arguments) -> RopeScaling | None:
    if arguments.is_on("use_rope_scaling"):
        return RopeScaling("llama3", arguments.number("rope_scaling_factor", 8.0))
    factor = arguments.number("rotary_seq_len_interpolation_factor", 1.0)
    return None if factor == 1 else RopeScaling("linear", factor)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(type(each) is int for each in value)


def _window(value: Any) -> int | None:
    """Theirs are the keys before the token, (-1, -1) for all; ours counts the token itself."""
    return None if value is None or value[0] < 0 else int(value[0]) + 1
