"""Read the arguments in a checkpoint folder of each program into an account; the files' code is never run."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.convert.adopt.account import Account, KeyAnswer, Outcome
from megalite.convert.adopt.checkpoint.namespace import answer_namespace
from megalite.convert.adopt.checkpoint.plain import load_table, plain, plain_fields
from megalite.convert.adopt.deepspeed_json import answer_json
from megalite.convert.adopt.keyed import trainer
from megalite.convert.adopt.launchers import set_data_parallel_size
from megalite.convert.adopt.neox import system as neox
from megalite.convert.adopt.sources import Source, read_source
from megalite.convert.deepspeed.folder import engine_files
from megalite.convert.deepspeed.neox_settings import CONFIGS
from megalite.convert.deepspeed.pipeline_folder import open_pipeline_folder
from megalite.convert.deepspeed.pipeline_reader import survey
from megalite.convert.foreign.places import find_config
from megalite.convert.foreign.unpickle import Foreign, load_pickle
from megalite.convert.huggingface.origin import read_object
from megalite.convert.megatron.arguments import Arguments, true_vocab_size
from megalite.convert.megatron.folder import COMMON, find_megatron_folder, find_sharded_folder
from megalite.convert.trainer.folder import ARGUMENTS, CONFIG, STATE, is_adapter, process_count
from megalite.errors import CheckpointError, ConfigError, Problem

_AGAIN = "fetch the checkpoint again"


@dataclass(frozen=True)
class FoundAccount:
    """The account of a folder. settings: what the folder says beside its arguments. flags: of the import."""

    account: Account
    settings: Mapping[str, Any] = field(default_factory=dict)
    flags: str = ""


def read_megatron(place: Path) -> FoundAccount:
    """Answer the args of a Megatron-LM checkpoint, of rank files or torch_dist. Raises CheckpointError."""
    sharded = find_sharded_folder(place)
    path = sharded / COMMON if sharded is not None else find_megatron_folder(place).files[0, 0]
    table = plain_fields(load_table(path).get("args"), path)
    account = Account("Megatron-LM")
    answer_namespace(account, table)
    _say_read(account, path, len(table))
    rows = table.get("padded_vocab_size")
    try:
        vocabulary = true_vocab_size(Arguments(table, path), rows if isinstance(rows, int) else 1 << 24, None)
    except CheckpointError:
        account.note(
            "vocabulary: args lack its size before the padding; give --vocab-size and model.vocab_size"
        )
        return FoundAccount(account, flags=" --vocab-size N")
    return FoundAccount(account, {"model.vocab_size": vocabulary})


def read_pipeline(place: Path) -> FoundAccount:
    """Answer a checkpoint of DeepSpeed's pipeline engine: the args of Megatron-DeepSpeed, or GPT-NeoX's files.

    Raises CheckpointError, and ConfigError for a folder without either.
    """
    folder = open_pipeline_folder(place)
    path = folder.states[0] if folder.states else place
    content = load_table(path) if folder.states else {}
    settings = {"model.vocab_size": survey(folder).vocabulary_rows()}
    if isinstance(content.get("args"), Foreign):
        table, engine = plain_fields(content["args"], path), _engine_settings(content, path)
        account = Account("Megatron-DeepSpeed")
        answer_namespace(account, table, deepspeed_json=bool(engine))
        answer_json(account, engine, "ds_config")
        _say_read(account, path, len(table) + len(engine))
        return FoundAccount(account, settings)
    configs = place / CONFIGS
    names = sorted(configs.iterdir()) if configs.is_dir() else []
    files = [name for name in names if name.suffix in (".yml", ".yaml", ".json")]
    if not files:
        remedy = "put the .yml files of the run there, or name them instead of the folder"
        raise ConfigError([Problem(str(configs), "has no files of GPT-NeoX", remedy)], "megalite adopt")
    sources = [read_source(name) for name in files]
    return FoundAccount(neox.SYSTEM.read([_as_yaml(source) for source in sources]), settings)


def read_trainer(place: Path) -> FoundAccount:
    """Answer the TrainingArguments of a Trainer's checkpoint, with the steps of its trainer_state.json.

    Raises CheckpointError, also for an object of a class that is not among the allowed ones.
    """
    path = place / ARGUMENTS
    fields = plain_fields(load_pickle(path), path)
    table = {key: value for key, value in fields.items() if not _is_computed(key, value)}
    for key, value in tuple(table.items()):
        if key not in trainer.RULES and value in (None, False, 0, "", [], {}):
            table[key] = None  # of a program on top of Trainer, and off
    state = read_object(place / STATE, _AGAIN) if (place / STATE).is_file() else {}
    steps = state.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        table["max_steps"] = steps
    account = trainer.SYSTEM.read([Source(path.with_suffix(".json"), json.dumps(_known(table)))])
    unset = [key for key in table if key not in _known(table)]
    if unset:
        _note_unset(account, unset)
    account.ranks = process_count(place) or None
    set_data_parallel_size(account)
    _say_read(account, path, len(fields))
    settings: dict[str, object] = {}
    if (place / CONFIG).is_file() and not is_adapter(place):
        account.answers = [answer for answer in account.answers if answer.key != "model"]
        settings["model.hf_config"] = str(place)
    return FoundAccount(account, settings)


def read_engine(place: Path) -> FoundAccount:
    """Answer the DeepSpeed JSON that a checkpoint of DeepSpeed's engine has. Raises CheckpointError."""
    path = engine_files(place).model[0]
    engine = _engine_settings(load_table(path), path)
    account = Account("DeepSpeed")
    answer_json(account, engine, "ds_config")
    _say_read(account, path, len(engine))
    missing = {"data": "set data.source, tokenizer.path and training.sequence_length"}
    hf_config = find_config(place)
    if hf_config is None:
        missing["model"] = "set model.hf_config to a folder with its config.json"
    for key, remedy in missing.items():
        reason = "is the program's own: DeepSpeed's JSON is all that the folder has"
        account.add(KeyAnswer(key, None, Outcome.REFUSED, {}, reason, remedy, numbers=True))
    if hf_config is None:
        return FoundAccount(account, flags=" --hf-config FOLDER")
    return FoundAccount(account, {"model.hf_config": str(hf_config)})


READERS: Mapping[str, Callable[[Path], FoundAccount]] = {
    "pipeline engine": read_pipeline,
    "Trainer": read_trainer,
    "engine": read_engine,
    "Megatron-LM": read_megatron,
}


def _engine_settings(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    settings = plain(content.get("ds_config"), path)
    return settings if isinstance(settings, dict) else {}


def _known(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def _note_unset(account: Account, names: list[str]) -> None:
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    account.answers.append(
        KeyAnswer(f"{len(names)} arguments ({some})", None, Outcome.NO_EFFECT, {}, "are not set")
    )


def _as_yaml(source: Source) -> Source:
    """Return a file of GPT-NeoX as its checkpoint has it: JSON under the name of a YAML file stays JSON."""
    try:
        is_json = isinstance(json.loads(source.text), dict)
    except (ValueError, RecursionError):
        is_json = False
    return Source(source.path.with_suffix(".json"), source.text) if is_json else source


def _is_computed(key: str, value: Any) -> bool:
    """Whether an attribute is one that TrainingArguments computes: accelerate's precision, devices, objects."""
    is_object = isinstance(value, str) and value.startswith("<") and value.endswith(">")
    return key == "mixed_precision" or key.startswith("_") or is_object


def _say_read(account: Account, path: Path, count: int) -> None:
    account.script.append(f"{path}: {count} arguments, unpickled by a reader that knows a list of classes")
