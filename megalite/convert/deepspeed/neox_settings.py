"""GPT-NeoX's settings, as its checkpoints keep them in `configs`, as the model's shape. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megalite.convert.adopt.deepspeed_json import NAMES
from megalite.convert.adopt.neox.system import RULES
from megalite.convert.adopt.sources import read_source
from megalite.convert.deepspeed.pipeline_names import Dialect
from megalite.convert.megatron.arguments import Arguments
from megalite.errors import CheckpointError, ConfigError
from megalite.families.registry import FAMILIES, inexpressible
from megalite.topology.shape import ModelShape

CONFIGS = "configs"
# Each changes the model where it is set, and is not built here.
_OFF = (
    "num_unique_layers",
    "opt_pos_emb_offset",
    "sliding_window_width",
    "soft_prompt_tuning",
    "te_fp8_mha",
    "te_layernorm_mlp",
    "te_mha",
    "use_bnb_optimizer",
    "use_mup",
    "use_qk_layernorm",
)
# setting -> the values that leave the model as it is built here; absent is the first of them.
_EXACT: dict[str, tuple[Any, ...]] = {
    "activation": ("gelu", "geglu", "silu", "swiglu", "swish"),
    "mlp_type": ("regular", "llama"),
    "moe_num_experts": (1,),
    "norm": ("layernorm", "rmsnorm"),
    "pos_emb": ("learned", "rotary"),
    "train_impl": ("normal", "dpo", "kto"),
}
# The settings that `convert inspect` prints first.
OF_INTEREST = (
    *("num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_kv_heads", "seq_length"),
    *(
        "max_position_embeddings",
        "pos_emb",
        "rotary_pct",
        "rotary_emb_base",
        "norm",
        "activation",
        "mlp_type",
    ),
    *("gpt_j_residual", "gpt_j_tied", "no_weight_tying", "model_parallel_size", "pipe_parallel_size"),
)
DOWN_NAMES = ("mlp.dense_4h_to_h.weight", "mlp.linear2.weight", "mlp.w2.weight")
_OLD_MLP = "mlp.dense_h_to_4h.weight"
_GATE_MLP = "mlp.w1.weight"


def read_settings(place: Path, arguments: Mapping[str, Any]) -> Arguments:
    """Return the settings of a checkpoint: its `configs` files and, above them, the `args` of its model_states.

    Raises CheckpointError for a file that cannot be read, or a setting that two files have.
    """
    folder = place / CONFIGS
    return Arguments({**_of_files(folder), **{str(key): value for key, value in arguments.items()}}, folder)


def unknown_keys(place: Path) -> list[str]:
    """Return the keys of the `configs` files that megalite adopt does not know, as a word that is mistyped."""
    known = {name.split(".")[0] for name in (*RULES, *NAMES)}
    return sorted(_of_files(place / CONFIGS).keys() - known)


def _of_files(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = {}
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in (name for name in names if name.suffix in (".yml", ".yaml", ".json")):
        for key, value in _read(path).items():
            name = str(key).replace("-", "_")
            if name in table:
                raise CheckpointError(f"{path} has {name}, which another file of {folder} has too; keep one")
            table[name] = value
    return table


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_source(path).mapping()
    except ConfigError as error:
        problem = "; ".join(map(str, error.problems))
        raise CheckpointError(f"{path} cannot be read: {problem}") from error


def not_built(settings: Arguments) -> Iterator[str]:
    """Yield every setting that makes another model of it than can be built here, as `name = value`."""
    table = settings.table
    for name in _OFF:
        if table.get(name) not in (None, False, 0, {}):
            yield f"{name} = {table[name]!r}"
    for name, allowed in _EXACT.items():
        if table.get(name, allowed[0]) not in (None, *allowed):
            yield f"{name} = {table[name]!r}"
    if not _is_dense_attention(table.get("attention_config")):
        yield f"attention_config = {table['attention_config']!r}"


def _is_dense_attention(config: Any) -> bool:
    """Whether an attention_config, [[[type, ...], repeats], ...] or a list of types, has only full attention."""
    if config is None:
        return True
    if isinstance(config, list):
        return all(isinstance(item, int) or _is_dense_attention(item) for item in config)
    return config in ("global", "flash")


@dataclass(frozen=True)
class Sizes:
    """The sizes that the tensors say: rows of the embedding, and columns of the second matrix of an MLP."""

    vocab_size: int
    intermediate_size: int


def neox_shape(settings: Arguments, names: set[str], sizes: Sizes) -> ModelShape:
    """Return the shape, of the family whose files can say it; names: of a decoder layer's tensors.

    Raises CheckpointError where the model is not built, or no family has it.
    """
    if unsupported := list(not_built(settings)):
        raise CheckpointError(f"{settings.source}: megalite does not support {', '.join(unsupported)}")
    hidden, heads = settings.whole("hidden_size"), settings.whole("num_attention_heads")
    groups = settings.whole("num_kv_heads", heads)
    if heads % groups or hidden % heads:
        raise settings.problem(f"{groups} key-value heads for {heads} heads of {hidden} channels")
    rms, separate = settings.table.get("norm") == "rmsnorm", _GATE_MLP in names
    attention_bias = settings.is_on("use_bias_in_attn_linear", True)
    parallel = "parallel_shared" if settings.is_on("gpt_j_tied") else "parallel"
    placement: Any = parallel if settings.is_on("gpt_j_residual") else "pre"
    epsilon = settings.number("rms_norm_epsilon", 1e-8) if rms else settings.number("layernorm_epsilon", 1e-5)
    shape = ModelShape(
        vocab_size=sizes.vocab_size,
        hidden_size=hidden,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=settings.whole("num_layers"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=hidden // heads,
        max_position_embeddings=settings.whole("max_position_embeddings"),
        rms_norm_eps=epsilon,
        tie_word_embeddings=not settings.is_on("no_weight_tying"),
        initializer_range=settings.number("init_method_std", 0.02),
        norm="rms_norm" if rms else "layer_norm",
        norm_placement=placement,
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=not separate and settings.is_on("use_bias_in_mlp", True),
        gated_mlp=separate or settings.table.get("activation") in ("geglu", "swiglu"),
        hidden_act=_activation(settings),
    )
    if settings.table.get("pos_emb") != "rotary":
        return _of_a_family(replace(shape, position_embedding="learned"), settings)
    theta, share = settings.number("rotary_emb_base", 10000.0), settings.number("rotary_pct", 1.0)
    return _of_a_family(replace(shape, rope_theta=theta, partial_rotary_factor=share), settings)


def _activation(settings: Arguments) -> Literal["silu", "gelu", "gelu_pytorch_tanh"]:
    if settings.table.get("activation") in ("silu", "swiglu", "swish"):
        return "silu"
    # The kernel that adds the bias too computes the approximation by tanh.
    fused = settings.table.get("activation", "gelu") == "gelu" and settings.is_on("bias_gelu_fusion")
    return "gelu_pytorch_tanh" if fused else "gelu"


def _of_a_family(shape: ModelShape, settings: Arguments) -> ModelShape:
    first = "gpt2" if shape.position_embedding == "learned" else "gpt_neox"
    families = [replace(shape, family=family) for family in (first, *FAMILIES)]
    nearest = min(families, key=lambda known: len(list(inexpressible(known))))
    if lacking := [f"{name} = {value!r}" for name, value, _ in inexpressible(nearest)]:
        raise CheckpointError(
            f"{settings.source}: no model family of megalite has {', '.join(lacking)} together with the other settings;"
            " such a checkpoint cannot be imported"
        )
    return nearest


def neox_dialect(shape: ModelShape, names: set[str]) -> Dialect:
    """Return how GPT-NeoX names and cuts the tensors of a model; names: of a decoder layer's tensors."""
    separate, old = _GATE_MLP in names, _OLD_MLP in names
    up, down = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h") if old else ("mlp.linear1", "mlp.linear2")
    grouped = shape.num_key_value_heads != shape.num_attention_heads
    # Versions with the older names of an MLP interleave a query head and its fractions of a key and a value head;
    # since November 2024 query, key and value follow each other.
    interleaved: Literal["head"] | None = "head" if separate or old else None
    return Dialect(
        program="GPT-NeoX",
        attention="attention",
        up="mlp.w3" if separate else up,
        down="mlp.w2" if separate else down,
        head="final_linear.weight",
        norm_weight="scale" if "input_layernorm.scale" in names else "weight",
        final_norm="norm.",
        gate="mlp.w1" if separate else None,
        gate_first=False,
        qkv=interleaved if grouped else "group",
        # With the parallel residual each rank adds its own biases before the sum over ranks.
        output_biases="terms" if shape.norm_placement.startswith("parallel") else "copies",
    )
