"""A Hugging Face config.json as the model's shape."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalite.config.draft import Draft
from megalite.config.hub import HubName, fetch_description
from megalite.config.schema import ModelConfig
from megalite.config.toml import shown
from megalite.errors import CheckpointError, ConfigError, Problem
from megalite.families.records import FAMILIES, Family
from megalite.topology.shape import ModelShape

_KEY = "model.hf_config"
# rope_parameters (transformers 5) or rope_scaling (4): their word -> ours.
_ROPE = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_positions",
}
_ELSEWHERE = {
    "gemma3": "it reads images too, which is not built: use a folder of its language model alone (gemma3_text)"
}
_ROPE_TYPES = {"default": (), "linear": ("factor",), "llama3": tuple(_ROPE)}


def apply_hf_config(draft: Draft) -> None:
    """Put the shape of model.hf_config behind the keys that [model] has; the path itself goes."""
    given = draft.take_out("model", "hf_config")
    named_by = _KEY
    if given is None:
        given, named_by = draft.section("model").get("weights"), "model.weights"
    if given is None:
        return
    try:
        path = _here(draft, str(given), named_by).expanduser()
        path = path / "config.json" if path.is_dir() else path
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("holds no JSON object")
    except CheckpointError as error:
        draft.problem(named_by, str(error))
        draft.incomplete.add("model")
        return
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        draft.problem(named_by, f'"{given}" cannot be read: {reason}', "name a config.json or its folder")
        draft.incomplete.add("model")
        return
    family = FAMILIES.get(str(found.get("model_type")))
    if family is None:
        kind = shown(found.get("model_type"))
        remedy = _ELSEWHERE.get(str(found.get("model_type")), f"{', '.join(FAMILIES)} are built")
        draft.problem(named_by, f"{path} is of model_type {kind}", remedy)
        draft.incomplete.add("model")
        return
    found = {**family.absent, **found}
    draft.problems += _unsupported(family, found, path, named_by)
    shape = {field: found[key] for field, key in family.keys.items() if found.get(key) is not None}
    shape |= _biases(family, found) | _rope(family, found) | _window(family, found)
    if family.model_type == "gpt2":
        shape.setdefault("intermediate_size", 4 * shape.get("hidden_size", 0))
        shape.setdefault("tie_word_embeddings", True)
    if named_by != _KEY and not (draft.has("tokenizer", "path") or draft.has("tokenizer", "vocab_size")):
        draft.set("tokenizer", "path", str(path.parent), named_by)
    draft.set_behind("model", {"family": family.model_type, **shape}, str(path), named_by=named_by)


def _here(draft: Draft, given: str, named_by: str) -> Path:
    """Where on this machine it is. A name of the Hub is fetched, and weights are from then on those of its commit."""
    name = HubName.of(given)
    if name is None:
        return Path(given)
    folder = fetch_description(name)
    if named_by != _KEY:
        draft.set("model", "weights", str(name.at(folder)), draft.origin(named_by))
    return folder


def shape_of_folder(folder: str) -> ModelShape:
    """The shape that the config.json of a Hugging Face folder, here or of the Hub, gives.

    Raises ConfigError when it is not built.
    """
    draft = Draft(folder, {"model": {"hf_config": folder}})
    apply_hf_config(draft)
    try:
        model = ModelConfig(**draft.section("model")) if not draft.problems else None
    except ValidationError as error:
        for each in error.errors(include_url=False):
            draft.problem(f"config.json: {each['loc'][0]}", str(each["msg"]).lower())
        model = None
    if model is None:
        raise ConfigError(draft.problems, draft.source)
    return model.shape(0)


def _unsupported(family: Family, found: Mapping[str, Any], path: Path, named_by: str) -> Iterator[Problem]:
    if found.get("quantization_config"):
        yield Problem(
            named_by, f"{path} has a quantization_config", "use the weights from before they were quantised"
        )
    for name, allowed in family.required.items():
        if name in found and found[name] not in allowed:
            words = " or ".join(map(shown, allowed))
            yield Problem(named_by, f"{path} has {name} = {shown(found[name])}", f"only {words} is built")
    yield from _unsupported_rope(family, found, path, named_by)
    if _full_layers(family, found) is None:
        remedy = "sliding_attention may only follow after full_attention"
        if "full_attention_every" in family.free:
            remedy += ", with every so manieth layer full_attention again"
        yield Problem(named_by, f"{path} mixes layer_types", remedy)


def _unsupported_rope(
    family: Family, found: Mapping[str, Any], path: Path, named_by: str
) -> Iterator[Problem]:
    local = _local_rope_of(found).get("rope_type", "default")
    if local != "default":
        message = f"{path} scales the rotary frequencies of layers with a window ({shown(local)})"
        yield Problem(named_by, message, 'only "default" is built')
    rope = _rope_of(found)
    kind = rope.get("rope_type", rope.get("type", "default"))
    built = _rope_types(family)
    if kind not in built:
        words = f"{', '.join(map(shown, built))} {'are' if len(built) > 1 else 'is'} built"
        if kind in ("longrope", "su"):
            words += "; longrope's change with the longest sequence of a batch"
        yield Problem(named_by, f"{path} scales its rotary frequencies ({shown(kind)})", words)
    elif (rope.get("partial_rotary_factor") or found.get("partial_rotary_factor") or 1.0) != 1.0:
        yield Problem(named_by, f"{path} rotates a part of each head", "only whole heads are built")


def _biases(family: Family, found: Mapping[str, Any]) -> dict[str, Any]:
    """Their one attention_bias is of all four projections."""
    read = {
        "attention_bias": "attention_bias",
        "attention_output_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    }
    return {ours: found[key] for ours, key in read.items() if ours in family.free and key in found}


def _rope(family: Family, found: Mapping[str, Any]) -> dict[str, Any]:
    if "rope_theta" not in family.free:
        return {}
    rope = _rope_of(found)
    kind = rope.get("rope_type", rope.get("type", "default"))
    types = _rope_types(family)
    read: dict[str, Any] = {"rope_type": kind} if kind in types and kind != "default" else {}
    read |= {_ROPE[key]: rope[key] for key in types.get(kind, ()) if key in rope}
    read["rope_theta"] = rope.get("rope_theta", found.get("rope_theta"))
    if "rope_local_base_freq" in family.free:
        local = _local_rope_of(found).get("rope_theta", found.get("rope_local_base_freq"))
        read["rope_local_base_freq"] = local
    return {name: value for name, value in read.items() if value is not None}


def _rope_types(family: Family) -> Mapping[str, tuple[str, ...]]:
    return _ROPE_TYPES if "rope_scaling" in family.free else {"default": ()}


def _rope_of(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_parameters of transformers 5, or rope_scaling of 4."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope) if isinstance(rope, Mapping) else {}
    return rope if isinstance(rope, Mapping) else {}


def _local_rope_of(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_parameters of layers with a window, where they have their own."""
    rope = found.get("rope_parameters")
    local = rope.get("sliding_attention") if isinstance(rope, Mapping) else None
    return local if isinstance(local, Mapping) else {}


def _window(family: Family, found: Mapping[str, Any]) -> dict[str, Any]:
    window = found.get("sliding_window")
    if "sliding_window" not in family.free or window is None:
        return {}
    layers = found.get("num_hidden_layers", 0)
    first, every = _full_layers(family, found) or (layers, 0)
    if first >= layers:
        return {}
    given = {"sliding_window": window, "full_attention_layers": first, "full_attention_every": every}
    return {name: value for name, value in given.items() if value}


def _full_layers(family: Family, found: Mapping[str, Any]) -> tuple[int, int] | None:
    """full_attention_layers and full_attention_every; None where they cannot say which layers have the window."""
    layers: int = found.get("num_hidden_layers", 0)
    if "full_attention_layers" not in family.free:
        return 0, 0
    kinds = found.get("layer_types")
    if not isinstance(kinds, list):
        if "full_attention_every" in family.free:
            return 0, found.get("sliding_window_pattern", 0)
        return (found.get("max_window_layers", 28) if found.get("use_sliding_window", False) else layers), 0
    first = kinds.index("sliding_attention") if "sliding_attention" in kinds else layers
    every = 0
    if "full_attention_every" in family.free and "full_attention" in kinds[first:]:
        every = kinds.index("full_attention", first) + 1
    for layer, kind in enumerate(kinds):
        full = layer < first or (every and (layer + 1) % every == 0)
        if kind != ("full_attention" if full else "sliding_attention"):
            return None
    return (first, every) if len(kinds) == layers else None
