"""A Hugging Face config.json as the model's shape."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.config.draft import Draft
from megalite.config.toml import shown
from megalite.errors import Problem

_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
)
# Parts of the Llama family that are not built here, with the only value that leaves them out.
_REQUIRED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}


def apply_hf_config(draft: Draft) -> None:
    """Put the shape of model.hf_config behind the keys that [model] has; the path itself goes."""
    given = draft.take_out("model", "hf_config")
    if given is None:
        return
    path = Path(str(given))
    try:
        path = path.expanduser()
        path = path / "config.json" if path.is_dir() else path
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("holds no JSON object")
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        draft.problem(
            "model.hf_config", f"{shown(given)} cannot be read: {reason}", "name a config.json or its folder"
        )
        draft.incomplete.add("model")
        return
    problems = list(_unsupported(found, path))
    draft.problems += problems
    if found.get("model_type") != "llama":
        draft.incomplete.add("model")
        return
    shape = {key: found[key] for key in _COPIED if found.get(key) is not None}
    theta = _rope(found).get("rope_theta", found.get("rope_theta"))
    if theta is not None:
        shape["rope_theta"] = theta
    draft.set_behind("model", {"family": "llama", **shape}, str(path), named_by="model.hf_config")


def _unsupported(found: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    key = "model.hf_config"
    if found.get("model_type") != "llama":
        yield Problem(
            key, f"{path} is of model_type {shown(found.get('model_type'))}", 'only "llama" is built'
        )
        return
    for name, needed in _REQUIRED.items():
        if found.get(name, needed) != needed:
            yield Problem(key, f"{path} has {name} = {shown(found[name])}", f"only {shown(needed)} is built")
    kind = _rope(found).get("rope_type", _rope(found).get("type", "default"))
    if kind != "default":
        yield Problem(key, f"{path} scales its rotary frequencies ({shown(kind)})", 'only "default" is built')


def _rope(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_parameters of transformers 5, or rope_scaling of 4."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    return rope if isinstance(rope, Mapping) else {}
