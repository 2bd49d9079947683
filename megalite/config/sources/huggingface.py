"""A Hugging Face config.json as the model's shape."""

import json
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalite.config.sections.schema import ModelConfig
from megalite.config.sections.shape_settings import as_settings
from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import SettingsDraft
from megalite.config.sources.hub import HubName, fetch_description
from megalite.config.sources.quantisation import KEY, is_block_fp8, is_int8, is_mxfp4
from megalite.errors import CheckpointError, ConfigError, listed
from megalite.families.family import Family
from megalite.families.inert import BATCH_BALANCE, INERT
from megalite.families.registry import FAMILIES
from megalite.topology.shape import ModelShape

logger = logging.getLogger(__name__)

_KEY = "model.hf_config"
_CODE = "auto_map"
_FOR_INFERENCE = ": int8 weights only generate, evaluate and serve"
_ELSEWHERE = {
    "gemma3": "it reads images too, which is not supported: use a folder of its language model alone (gemma3_text)"
}


def apply_hf_config(draft: SettingsDraft, *, int8: bool = False, trains: bool = True) -> None:
    """Put the shape of model.hf_config behind the keys that [model] has; the path itself goes.

    int8: take a folder of int8 weights too, to generate from; nothing else reads one. trains: take dropout too.
    """
    named = draft.take_out("model", "hf_config")
    named_by = _KEY
    if named is None:
        named, named_by = draft.section("model").get("weights"), "model.weights"
    if named is None:
        return
    try:
        path = _here(draft, str(named), named_by).expanduser()
        path = path / "config.json" if path.is_dir() else path
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("holds no JSON object")
    except CheckpointError as error:
        draft.problem(named_by, str(error))
        draft.incomplete.add("model")
        return
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        draft.problem(named_by, f'"{named}" cannot be read: {reason}', "name a config.json or its folder")
        draft.incomplete.add("model")
        return
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        kind = shown(config.get("model_type"))
        remedy = _ELSEWHERE.get(str(config.get("model_type")), f"{', '.join(FAMILIES)} are supported")
        draft.problem(named_by, f"{path} is of model_type {kind}", remedy)
        draft.incomplete.add("model")
        return
    quantised = config.get(KEY)
    known = is_block_fp8(quantised) or (int8 and is_int8(quantised))
    if quantised and not known and not (family.names.interleaved and is_mxfp4(quantised)):
        remedy = "use the weights from before they were quantised"
        draft.problem(named_by, f"{path} has a {KEY}", f"{remedy}{_FOR_INFERENCE * is_int8(quantised)}")
    for text, remedy in family.refused(config):
        draft.problem(named_by, f"{path} {text}", remedy)
        draft.incomplete.add("model")
    draft.notes += [f"{path} {text}" for text in notes_of(family, config)]
    shape = as_settings(family.read_config(config))
    if named_by != _KEY and draft.is_open("tokenizer", "path") and not draft.has("tokenizer", "vocab_size"):
        draft.set("tokenizer", "path", str(path.parent), named_by)
    draft.set_behind("model", {"family": family.model_type, **shape}, str(path), named_by=named_by)
    draft.set_behind("checkpoint", {"export_like": str(path)}, str(path), named_by=named_by)
    if trains:
        _take_dropout(draft, family.read_dropout(config), str(path), named_by)


def notes_of(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what config.json has that a run does not do: what transformers' own model does not either, and padding."""
    known = family.config_keys | family.dropouts.keys() | INERT | {_CODE, KEY}
    unknown = sorted(key for key in config.keys() - known if config[key] is not None)
    if unknown := [*unknown, *family.ignored(config)]:
        yield f"has keys that transformers' {family.model_type} does not use, nor this run: {listed(unknown)}"
    if is_block_fp8(config.get(KEY)):
        yield "has weights in FP8, which are multiplied by their factors when they are read: nothing computes in FP8"
    if code := config.get(_CODE):
        classes = sorted({str(name) for name in code.values()} if isinstance(code, Mapping) else {str(code)})
        yield (
            f"names code of its own ({listed(classes)}), which is not run: the model is transformers'"
            f" {family.model_type}"
        )
    if all(map(config.get, BATCH_BALANCE)):
        yield (
            f"has output_router_logits and router_aux_loss_coef = {shown(config[BATCH_BALANCE[1]])}, transformers' loss"
            " on the experts of a whole batch, which is not computed; training.router_balance is that of each sequence"
        )
    padding, ends = config.get("pad_token_id"), config.get("eos_token_id")
    if (
        family.has_padding_row
        and padding is not None
        and padding in (ends if isinstance(ends, list) else [ends])
    ):
        yield (
            f"has pad_token_id = {shown(padding)}, an end of text too: transformers gives that row of the embedding no"
            " gradient, megalite trains it"
        )


def _take_dropout(draft: SettingsDraft, dropout: Mapping[str, Any], path: str, named_by: str) -> None:
    draft.set_behind("model", dropout, path, named_by=named_by)
    taken = {name: value for name, value in dropout.items() if draft.origin(f"model.{name}") == path}
    if taken:
        values = " and ".join(f"model.{name} = {shown(value)}" for name, value in taken.items())
        draft.notes.append(f"{values} as in {path}; for training without dropout set 0")


def _here(draft: SettingsDraft, named: str, named_by: str) -> Path:
    """Where on this machine it is. A name of the Hub is fetched, and weights are from then on those of its commit."""
    name = HubName.of(named)
    if name is None:
        return Path(named)
    folder = fetch_description(name)
    if named_by != _KEY:
        draft.set("model", "weights", str(name.at(folder)), draft.origin(named_by))
    return folder


@cache
def _warn_once(note: str) -> None:
    """Log a note; a process that reads a folder several times logs it once."""
    logger.warning("note: %s", note)


def shape_of_folder(folder: str, *, int8: bool = False) -> ModelShape:
    """The shape that the config.json of a Hugging Face folder, here or of the Hub, gives.

    int8: as for `apply_hf_config`. Raises ConfigError when it is not built.
    """
    draft = SettingsDraft(folder, {"model": {"hf_config": folder}})
    apply_hf_config(draft, int8=int8, trains=False)
    for note in draft.notes:
        _warn_once(note)
    try:
        model = ModelConfig(**draft.section("model")) if not draft.problems else None
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            draft.problem(f"config.json: {detail['loc'][0]}", str(detail["msg"]).lower())
        model = None
    if model is None:
        raise ConfigError(draft.problems, draft.source)
    return model.shape(0)
