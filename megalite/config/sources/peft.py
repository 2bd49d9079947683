"""PEFT's adapter_config.json as settings of [adapter]."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalite.config.peft_names import canonical_word
from megalite.config.sections.adapter_section import AdapterConfig, described_adapter
from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import SettingsDraft
from megalite.errors import ConfigError, listed
from megalite.families.registry import FAMILIES
from megalite.topology.adapter import Adapter

logger = logging.getLogger(__name__)

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_KEY = "adapter.path"
# Keys that make an adapter that is not built, unless they are empty.
_REFUSED = (
    *("rank_pattern", "alpha_pattern", "loftq_config", "layers_to_transform", "layers_pattern"),
    *("layer_replication", "exclude_modules", "target_parameters", "trainable_token_indices"),
    *("alora_invocation_tokens", "lora_bias", "fan_in_fan_out", "use_qalora", "use_bdlora"),
    *("arrow_config", "kasa_config", "monteclora_config", "ensure_weight_tying"),
)
# Keys that say where an adapter comes from and how its training began: its weights are in the file.
_INERT = (
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "init_lora_weights", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("megatron_config", "megatron_core", "qalora_group_size", "runtime_config", "target_modules"),
    *("modules_to_save", "num_virtual_tokens", "token_dim", "num_transformer_submodules"),
    *("num_attention_heads", "num_layers", "init_weights", "encoder_hidden_size", "prefix_projection"),
)
_CHANGES_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""The beginnings of values of init_lora_weights with which PEFT changes the weights of the base as it loads."""
_WORDS = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "bias": "bias"} | {
    "use_rslora": "rslora",
    "use_dora": "dora",
}
_EMPTY: tuple[Any, ...] = (None, False, [], {}, "")
# PEFT's own.
_DEFAULTS = {
    "r": 8,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
}


def apply_peft(draft: SettingsDraft) -> None:
    """Put the settings of adapter.path behind the keys that [adapter] has."""
    folder = draft.section("adapter").get("path")
    if not isinstance(folder, str):
        return
    path = Path(folder).expanduser() / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("holds no JSON object")
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        draft.problem(_KEY, f'"{path}" cannot be read: {reason}', "name a folder that PEFT has saved")
        draft.incomplete.add("adapter")
        return
    if problem := _refusal(config):
        draft.problem(_KEY, f"{path} {problem}", "use another adapter, or merge it into its model with PEFT")
        draft.incomplete.add("adapter")
        return
    known = {*_INERT, *_REFUSED, *_DEFAULTS}
    if unknown := sorted(key for key in config.keys() - known if config[key] not in _EMPTY):
        draft.notes.append(f"{path} has keys that PEFT does not have, nor this run: {listed(unknown)}")
    if config["peft_type"] == "PREFIX_TUNING":
        # PEFT saves the keys and values that a projection has computed.
        prefix = {"kind": "prefix", "tokens": config.get("num_virtual_tokens")}
        draft.set_behind("adapter", prefix, str(path), named_by=_KEY)
        return
    given_there = {**_DEFAULTS, **config}
    settings = {ours: given_there[theirs] for theirs, ours in _WORDS.items()}
    for name in ("alpha", "dropout"):
        # A whole number in JSON; another value is for the schema to refuse.
        settings[name] = float(settings[name]) if isinstance(settings[name], int) else settings[name]
    named = draft.section("model").get("family")
    family = named if isinstance(named, str) and named in FAMILIES else "llama"
    for theirs, ours in (("target_modules", "targets"), ("modules_to_save", "modules_to_save")):
        settings[ours] = [canonical_word(family, each) for each in sorted(config.get(theirs) or [])]
    draft.set_behind("adapter", {"kind": "lora", **settings}, str(path), named_by=_KEY)


def adapter_of_folder(folder: Path, family: str) -> Adapter:
    """Return the adapter that a folder in PEFT's format describes, for a model of this family.

    Raises ConfigError when it is not built.
    """
    draft = SettingsDraft(str(folder), {"adapter": {"path": str(folder)}, "model": {"family": family}})
    apply_peft(draft)
    try:
        adapter = AdapterConfig(**draft.section("adapter")) if not draft.problems else None
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            draft.problem(f"{ADAPTER_CONFIG}: {detail['loc'][0]}", str(detail["msg"]).lower())
        adapter = None
    for note in draft.notes:
        logger.warning("note: %s", note)
    described = None if adapter is None else described_adapter(adapter)
    if described is None:
        raise ConfigError(draft.problems, draft.source)
    return described


def _refusal(config: Mapping[str, Any]) -> str | None:
    """Return what of the file is not built; None if all of it is."""
    kind = config.get("peft_type")
    if kind not in ("LORA", "PREFIX_TUNING"):
        return f"is of peft_type {shown(kind)}; LORA and PREFIX_TUNING are supported"
    for key in ("target_modules", "modules_to_save") if kind == "LORA" else ():
        names = config.get(key) or ([] if key == "modules_to_save" else None)
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            return f"has {key} {shown(config.get(key))}, which is not a list of names"
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_THE_BASE):
        return f"has init_lora_weights = {shown(init)}, with which PEFT changes the weights of the base too"
    set_keys = (key for key in _REFUSED if config.get(key))
    return next((f"has {key} = {shown(config[key])}, which is not supported" for key in set_keys), None)
