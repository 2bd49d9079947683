"""The keys of a Hugging Face folder that megalite does not use: kept with a run, and put into its exports. No torch."""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.checkpoint.folder import run_folders
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES

FOLDER = "huggingface"
CONFIG, GENERATION = "config.json", "generation_config.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of every family that an export says itself; code is never copied.
_OURS = frozenset({"architectures", "model_type", "dtype", "torch_dtype", "auto_map", "quantization_config"})


def keep_origin(config: Path, run_folder: Path) -> None:
    """Copy a config.json and the generation_config.json beside it to `run_folder`/huggingface, unless it exists."""
    kept = run_folder / FOLDER
    if kept.exists() or not config.is_file():
        return
    kept.mkdir(parents=True)
    for source, name in ((config, CONFIG), (config.parent / GENERATION, GENERATION)):
        if source.is_file():
            shutil.copyfile(source, kept / name)


def find_origin(checkpoint: Path) -> Path | None:
    """Return the config.json that a checkpoint's run keeps, or None."""
    configs = (run / FOLDER / CONFIG for run in run_folders(checkpoint))
    return next((config for config in configs if config.is_file()), None)


def end_ids(config: Path | None) -> frozenset[int]:
    """Return the ids that end a text: eos_token_id of generation_config.json beside a config.json, else of that one."""
    files = [] if config is None else [config.parent / GENERATION, config]
    ids_of_files = (frozenset(_ends(read_object(file, "fetch it again"))) for file in files if file.is_file())
    return frozenset(end for end in next(filter(None, ids_of_files), ()) if type(end) is int and end >= 0)


class Origin:
    """The two files that a run keeps; both empty without them. Raises CheckpointError for a damaged file."""

    def __init__(self, config: Path | None):
        self.config = {} if config is None else read_object(config)
        generation = None if config is None else config.parent / GENERATION
        self.generation = {} if generation is None or not generation.is_file() else read_object(generation)

    def config_with(
        self, ours: Mapping[str, Any], token_ids: Mapping[str, int], model_settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return config.json: the keys that say the shape are `ours`, all others stay.

        token_ids: of the exported tokenizer. model_settings: the run's [model], whose dropout is written.
        """
        family = FAMILIES[ours["model_type"]]
        if self.config.get("model_type", ours["model_type"]) != ours["model_type"]:
            return {**ours, **token_ids, **family.write_dropout(model_settings)}
        owned = family.config_keys | _OURS
        kept = {
            key: value
            for key, value in self.config.items()
            if key not in owned or (value is None and key not in ours)
        }
        said = {key: value for key, value in ours.items() if key in owned or key not in self.config}
        return {
            **kept,
            **said,
            **self._token_ids(self.config, token_ids),
            **family.write_dropout(model_settings),
        }

    def generation_with(
        self, token_ids: Mapping[str, int], turn_ends: Collection[int] = ()
    ) -> dict[str, Any]:
        """Return generation_config.json; without an origin greedy generation. turn_ends: ids that end answers too."""
        written = {**(self.generation or {"do_sample": False}), **self._token_ids(self.generation, token_ids)}
        ends = (
            [*_ends(written)]
            or [*_ends(self.config)]
            or [token_ids[key] for key in token_ids if "eos" in key]
        )
        if more := sorted(set(turn_ends).difference(ends)):
            written["eos_token_id"] = [*ends, *more]
        return written

    def _token_ids(self, file: Mapping[str, Any], token_ids: Mapping[str, int]) -> dict[str, Any]:
        """Return the ids to write in place of a file's: those that it lacks, or all if the tokenizer is another one.

        It is another one if its end of document is not among the ids that ended a text.
        """
        ends = {end for each in (self.config, self.generation) for end in _ends(each)}
        if not token_ids or not ends:
            return {key: value for key, value in token_ids.items() if file.get(key) is None}
        if token_ids["eos_token_id"] in ends:
            return {}
        return {**{key: None for key in _TOKEN_IDS if key in file}, **token_ids}


def _ends(file: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the ids of a file that end a text: eos_token_id is one or a list."""
    ends = file.get("eos_token_id")
    yield from ends if isinstance(ends, list) else [] if ends is None else [ends]


def read_object(path: Path, remedy: str = "remove its folder to export without it") -> dict[str, Any]:
    """Return the JSON object of a file. Raises CheckpointError, with the remedy."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; {remedy}")
    return content
