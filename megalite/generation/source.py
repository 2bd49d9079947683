"""Find what a path to generate from names: a checkpoint or a Hugging Face folder, with its tokenizer. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.folder import (
    checkpoints_of,
    find_checkpoint,
    find_latest,
    find_tokenizer,
    require_whole,
)
from megalite.checkpoint.manifest import MANIFEST
from megalite.config.sources.hub import HubName
from megalite.config.sources.huggingface import shape_of_folder
from megalite.config.sources.peft import ADAPTER_CONFIG, adapter_of_folder
from megalite.config.sources.quantisation import holds_int8
from megalite.convert.foreign.formats import require_not_foreign
from megalite.convert.huggingface.files import is_folder_of_weights, local_folder
from megalite.convert.huggingface.origin import CONFIG, end_ids, find_origin, read_object
from megalite.convert.huggingface.packed_header import require_packed
from megalite.convert.peft.base import base_of_adapter, folder_of_base
from megalite.convert.peft.named import AdaptedModel, find_adapter
from megalite.convert.weight_source import WeightSource
from megalite.errors import CheckpointError
from megalite.topology.experts import MixtureShape


@dataclass(frozen=True, kw_only=True)
class ModelSource(WeightSource):
    """A model on disk: its weights, with the base of an adapter, and its tokenizer.

    tokenizer: a Hugging Face folder or a tokenizer.json. end_of_document: the token that ended documents in training;
    None: the tokenizer's own. chat_template: the template of training, by name or file; None: the tokenizer's own.
    adapters: those that requests may name. end_ids: eos_token_id of the weights' files. of_conversations: whether a
    checkpoint was trained on them.
    """

    tokenizer: Path
    end_of_document: str | None = None
    chat_template: str | None = None
    adapters: Mapping[str, WeightSource] = field(default_factory=dict, hash=False)
    end_ids: frozenset[int] = frozenset()
    of_conversations: bool = False


class SourceOptions(TypedDict, total=False):
    """The options of `find_source`."""

    step: int | None
    tokenizer: Path | str | None
    base: Path | str | None
    adapters: Mapping[str, Path | str] | None


def find_source(
    path: Path | str,
    *,
    step: int | None = None,
    tokenizer: Path | str | None = None,
    base: Path | str | None = None,
    adapters: Mapping[str, Path | str] | None = None,
) -> ModelSource:
    """Return the model that `path` names: a run folder, a checkpoint, a Hugging Face or PEFT folder, or org/name.

    step: the checkpoint of this step instead of the latest. tokenizer: to use instead of the model's own. base: the
    weights beside an adapter, where they have moved. adapters: name -> folder of those that requests may name.
    Raises CheckpointError if there is none, if it is damaged, if it has no tokenizer, or if an adapter cannot stand
    beside it; ConfigError if a config.json has a model that is not built.
    """
    beside = [None if place is None else Path(place) for place in (tokenizer, base)]
    source = _source_of(path, step, *beside)
    if not adapters:
        return source
    if source.base is not None:
        raise CheckpointError(f"{path} is an adapter itself; name its base as MODEL: {source.base}")
    if source.format != "huggingface":
        raise CheckpointError(
            f"{path} is a checkpoint, and adapters belong to a Hugging Face folder; name that folder as MODEL"
        )
    model = AdaptedModel(source.folder, source.shape, source.int8)
    named = {name: find_adapter(name, Path(folder), model) for name, folder in adapters.items()}
    return replace(source, adapters=named)


def _source_of(path: Path | str, step: int | None, tokenizer: Path | None, base: Path | None) -> ModelSource:
    name, here = HubName.of(str(path)), Path(path).expanduser()
    if name is None and (here / ADAPTER_CONFIG).is_file():
        beside = base_of_adapter(here, base)
        plain = shape_of_folder(str(beside))
        shape = replace(plain, adapter=adapter_of_folder(here, plain.family))
        own = next((each for each in (here, beside) if (each / "tokenizer.json").is_file()), None)
        ends = end_ids(here / CONFIG) or end_ids(beside / CONFIG)
        words = _required(tokenizer or own, here)
        return ModelSource(here, "peft", shape, beside, tokenizer=words, end_ids=ends)
    if name is None and not _has_checkpoint(here) and not any(here.glob("*.safetensors")):
        require_not_foreign(here, "MODEL", "export {} FOLDER")
    if name is not None or _is_huggingface(here):
        if step is not None:
            raise CheckpointError(
                f"{path} is a Hugging Face folder, which has no steps; leave out step = {step}"
            )
        folder = local_folder(str(path))
        _require_description(folder)
        own = folder if (folder / "tokenizer.json").is_file() else None
        shape = shape_of_folder(str(folder), int8=True)
        words, ends = _required(tokenizer or own, folder), end_ids(folder / CONFIG)
        int8 = holds_int8(folder)
        if int8 and isinstance(shape, MixtureShape):
            require_packed(shape)
        return ModelSource(folder, "huggingface", shape, int8=int8, tokenizer=words, end_ids=ends)
    if step is None and _is_unknown(here):
        raise CheckpointError(
            f"{path} is no model: a checkpoint or run folder has {MANIFEST}, a Hugging Face folder config.json and"
            " *.safetensors; name one of them"
        )
    checkpoint = find_checkpoint(here) if step is None else checkpoints_of(here, [step])[0]
    manifest = require_whole(checkpoint)
    check_coverage(manifest, checkpoint)
    words = _required(tokenizer or find_tokenizer(checkpoint, manifest), checkpoint)
    settings = manifest.config.get("tokenizer") or {}
    frozen = None if manifest.model.adapter is None else folder_of_base(manifest.base, base)
    end, template = settings.get("end_of_document"), settings.get("chat_template")
    ends, trained_on = end_ids(find_origin(checkpoint)), (manifest.config.get("data") or {}).get("kind")
    return ModelSource(
        checkpoint,
        "checkpoint",
        manifest.model,
        frozen,
        tokenizer=words,
        end_of_document=end,
        chat_template=template,
        end_ids=ends,
        of_conversations=trained_on in ("instruct", "preference"),
    )


def _has_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or find_latest(folder / "checkpoints") is not None


def _is_huggingface(folder: Path) -> bool:
    return not _has_checkpoint(folder) and is_folder_of_weights(folder)


def _is_unknown(path: Path) -> bool:
    """Return whether something is there that is no checkpoint, no folder of them and no run folder."""
    folders = (path, path / "checkpoints")
    return path.exists() and not (path / MANIFEST).is_file() and not any(map(find_latest, folders))


def _require_description(folder: Path) -> None:
    """Raise CheckpointError if a Hugging Face folder has no config.json, or one that is no JSON object."""
    file = folder / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{folder} has weights but no {CONFIG}; copy the model's {CONFIG} there")
    read_object(file, "fetch it again")


def _required(tokenizer: Path | None, model: Path) -> Path:
    if tokenizer is None:
        raise CheckpointError(f"no tokenizer was found for {model}; name one with --tokenizer")
    return tokenizer
