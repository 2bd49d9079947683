"""GPT-NeoX's keys that describe the model together: widths, norms, blocks, attention, initial values."""

from collections.abc import Mapping
from dataclasses import fields
from math import sqrt
from typing import Any

from megalite.convert.adopt.rules import Reading, number, switch, whole
from megalite.families.registry import FAMILIES, inexpressible
from megalite.topology.shape import ModelShape

GATED = {"swiglu": "silu", "geglu": "gelu"}
_PLAIN = {"gelu": "gelu", "silu": "silu", "swish": "silu"}
NORMS = {
    "layernorm": "layer_norm",
    "te_layernorm": "layer_norm",
    "rmsnorm": "rms_norm",
    "te_rmsnorm": "rms_norm",
}
_DENSE = ("flash", "global")
_NEOX = "GPT-NeoX's default"


def read_activation(reading: Reading, key: str, value: Any) -> None:
    """activation: with bias_gelu_fusion the kernel computes gelu's approximation by tanh."""
    if value == "gelu" and reading.is_on("bias_gelu_fusion"):
        settings = {"model.hidden_act": "gelu_pytorch_tanh", "model.gated_mlp": False}
        reading.take(key, settings, "bias_gelu_fusion computes the approximation by tanh")
    elif value in GATED:
        reading.take(key, {"model.hidden_act": GATED[value], "model.gated_mlp": True})
    elif value in _PLAIN:
        reading.take(key, {"model.hidden_act": _PLAIN[value], "model.gated_mlp": False})
    else:
        known = ", ".join((*_PLAIN, *GATED))
        reading.refuse(key, "megalite has no such activation", f"it has {known}")


def read_gelu_fusion(reading: Reading, key: str, value: Any) -> None:
    """bias_gelu_fusion changes the numbers of gelu alone."""
    if switch(value) and reading.get("activation", "gelu") == "gelu":
        settings = {"model.hidden_act": "gelu_pytorch_tanh", "model.gated_mlp": False}
        reading.take(key, settings, "its kernel computes gelu's approximation by tanh")
    else:
        reading.no_effect(key, "it is off, or the activation is not gelu")


def read_width(reading: Reading, key: str, value: Any) -> None:
    """intermediate_size, expansion_factor and mlp_multiple_of: NeoX's arithmetic for the width of the MLP."""
    computed = _width(reading)
    if computed is None:
        reading.no_effect(key, "hidden_size, which it needs, is missing")
    elif isinstance(computed, str):
        remedy = "set model.intermediate_size in run.toml; for a gated MLP GPT-NeoX reads 3 times that number"
        reading.refuse(key, computed, remedy)
    elif computed == value:
        reading.take(key, {"model.intermediate_size": computed})
    else:
        reason = "GPT-NeoX's width of each half of a gated MLP" if _is_gated(reading) else "GPT-NeoX's width"
        reading.change(key, {"model.intermediate_size": computed}, reason)


def _is_gated(reading: Reading) -> bool:
    return reading.get("activation") in GATED


def _width(reading: Reading) -> int | str | None:
    """The width as ParallelMLP computes it; a text where its two projections would not fit each other."""
    if not reading.has("hidden_size"):
        return None
    hidden = whole(reading.get("hidden_size"))
    width = 4 * hidden
    if reading.has("intermediate_size"):
        width = whole(reading.get("intermediate_size"))
    elif reading.has("expansion_factor"):
        width = int(number(reading.get("expansion_factor")) * hidden)
    multiple = max(1, whole(reading.get("mlp_multiple_of", 1)))
    if not _is_gated(reading):
        return -(-width // multiple) * multiple
    both = int(width * 2 / 3)
    half = -(-(both // 2) // multiple) * multiple
    first = -(-both // (2 * multiple)) * 2 * multiple
    if first != 2 * half:
        return f"gives a gated MLP of {first // 2} columns and {half} rows, which GPT-NeoX cannot multiply"
    return half


def read_epsilon(reading: Reading, key: str, value: Any) -> None:
    if key == _epsilon_key(reading):
        reading.take(key, {"model.rms_norm_eps": number(value)})
    else:
        reading.no_effect(key, "it belongs to another norm")


def _epsilon_key(reading: Reading) -> str:
    is_rms = NORMS.get(reading.get("norm", "layernorm")) == "rms_norm"
    return "rms_norm_epsilon" if is_rms else "layernorm_epsilon"


def read_norm_bias(reading: Reading, key: str, value: Any) -> None:
    if NORMS.get(reading.get("norm", "layernorm")) == "rms_norm":
        reading.no_effect(key, "an RMSNorm has no bias")
    elif switch(value):
        reading.take(key, {}, "megalite's LayerNorm has a bias")
    else:
        reading.refuse(key, "megalite's LayerNorm has a bias", 'use norm: "rmsnorm", or leave the biases in')


def read_blocks(reading: Reading, key: str, value: Any) -> None:
    """gpt_j_residual and gpt_j_tied: blocks one after the other, or side by side with two norms or one."""
    parallel, tied = reading.is_on("gpt_j_residual"), reading.is_on("gpt_j_tied")
    if key == "gpt_j_tied" and not parallel:
        reading.no_effect(key, "it belongs to gpt_j_residual")
        return
    placement = ("parallel_shared" if tied else "parallel") if parallel else "pre"
    reading.take(key, {"model.norm_placement": placement})


def read_rotation(reading: Reading, key: str, value: Any) -> None:
    setting = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}[key]
    if reading.get("pos_emb") == "rotary":
        reading.take(key, {f"model.{setting}": number(value)})
    else:
        reading.no_effect(key, "the position embedding is not rotary")


def read_attention(reading: Reading, key: str, value: Any) -> None:
    """attention_config: [[[type, ...], number of layers or "all"], ...]."""
    kinds: list[str] = []
    for part in value if isinstance(value, list) else ():
        types = part[0] if isinstance(part, list) and part else part
        kinds += [str(kind) for kind in (types if isinstance(types, list) else [types])]
    if not kinds:
        raise ValueError('it should be a list such as [[["flash"], 12]]')
    others = sorted({kind for kind in kinds if kind not in _DENSE})
    if others:
        remedy = "megalite has dense attention and sliding windows (model.sliding_window)"
        reading.refuse(key, f"megalite has no layers of the kind {', '.join(others)}", remedy)
    else:
        reading.take(key, {}, "megalite chooses the kernel of dense attention itself")


def read_initial(reading: Reading, key: str, value: Any) -> None:
    """init_method, output_layer_init_method and init_method_std: standard deviations of the initial weights."""
    stds = _initial_stds(reading)
    if stds is None:
        reading.refuse(key, "needs hidden_size and num_layers", "give the file of the model too")
    elif isinstance(stds, str):
        mine = key == stds
        if mine:
            reading.refuse(
                key,
                "megalite draws initial weights from a normal distribution of one deviation",
                "set model.initializer_range, or start from weights",
            )
        else:
            reading.no_effect(key, f"{stds} is refused")
    elif key == "output_layer_init_method":
        _answer_output_deviation(reading, key, stds)
    else:
        settings = {"model.initializer_range": stds[0]}
        if key == "init_method_std" and reading.get("init_method", "normal") != "normal":
            reading.no_effect(key, f"init_method {reading.get('init_method')} computes its own")
        else:
            reading.take(key, settings, "" if key == "init_method_std" else "its standard deviation")


def _answer_output_deviation(reading: Reading, key: str, stds: tuple[float, float]) -> None:
    ours = stds[0] / sqrt(2 * whole(reading.get("num_layers")))
    if abs(ours - stds[1]) <= 1e-9 * ours:
        reading.take(key, {}, "the same standard deviation here")
    else:
        reason = f"attention and MLP outputs start with the deviation {ours:.3g} instead of {stds[1]:.3g}"
        reading.change(key, {}, f"{reason} (a run from given weights is not affected)")


def _initial_stds(reading: Reading) -> tuple[float, float] | str | None:
    """The deviations of most weights and of the outputs of blocks; the key of a method that is not built."""
    try:
        hidden, layers = whole(reading.get("hidden_size")), whole(reading.get("num_layers"))
    except ValueError:
        return None
    std = number(reading.get("init_method_std", 0.02))
    methods = {
        "normal": std,
        "scaled_normal": std / sqrt(2 * layers),
        "small_init": sqrt(2 / (5 * hidden)),
        "wang_init": 2 / layers / sqrt(hidden),
    }
    first = reading.get("init_method", "normal")
    last = reading.get("output_layer_init_method", "scaled_normal")
    if first not in methods:
        return "init_method"
    return (methods[first], methods[last]) if last in methods else "output_layer_init_method"


def fill_model_defaults(reading: Reading) -> None:
    """Set what NeoX's defaults say of the model where no key does."""
    account = reading.account
    if not reading.has("num_layers"):
        return
    rotary = reading.get("pos_emb") == "rotary"
    width = _width(reading)
    if isinstance(width, int):
        before = 256 * -(-int(8 * whole(reading.get("hidden_size")) / 3) // 256)
        reason = (
            f", a third of 4 times hidden_size; its older versions made {before}"
            if _is_gated(reading)
            else ""
        )
        account.default("model.intermediate_size", width, _NEOX + reason)
    defaults: Mapping[str, Any] = {
        "model.norm": "layer_norm",
        "model.rms_norm_eps": 1e-8 if _epsilon_key(reading) == "rms_norm_epsilon" else 1e-5,
        "model.position_embedding": "learned",
        "model.norm_placement": "pre",
        "model.hidden_act": "gelu",
        "model.gated_mlp": False,
        "model.attention_bias": True,
        "model.attention_output_bias": True,
        "model.tie_word_embeddings": True,
        **({"model.partial_rotary_factor": 1.0, "model.rope_theta": 10000.0} if rotary else {}),
    }
    for setting, value in defaults.items():
        account.default(setting, value, _NEOX)
    older = "; before 2024 a gated MLP had no biases" if _is_gated(reading) else ""
    account.default("model.mlp_bias", True, _NEOX + older)
    stds = _initial_stds(reading)
    if isinstance(stds, tuple):
        account.default("model.initializer_range", stds[0], _NEOX)


def choose_family(reading: Reading) -> None:
    """Choose the first family whose files can say the shape; without one the run cannot be exported."""
    settings = reading.account.settings
    shape = _shape(settings)
    if shape is None:
        return
    neox_first = sorted(FAMILIES, key=lambda name: name != "gpt_neox")
    for name in neox_first if shape.norm == "layer_norm" else FAMILIES:
        candidate = ModelShape(**{**vars(shape), "family": name})
        if not any(inexpressible(candidate)):
            reading.account.default(
                "model.family", name, "the family of Hugging Face whose files can say this model"
            )
            return
    reading.account.default("model.family", "llama", "a name only: no family of Hugging Face has this model")
    reading.account.default("checkpoint.export", False, "no family of Hugging Face has this model")


def _shape(settings: Mapping[str, Any]) -> ModelShape | None:
    """The shape of the settings; None where a size is missing or impossible."""
    known = {field.name for field in fields(ModelShape)}
    values = {
        name.removeprefix("model."): value for name, value in settings.items() if name.startswith("model.")
    }
    values = {name: value for name, value in values.items() if name in known}
    try:
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        values.setdefault("num_key_value_heads", heads)
        values.setdefault("vocab_size", 1)
        return ModelShape(head_dim=hidden // heads, **values)
    except (KeyError, TypeError, ZeroDivisionError):
        return None
