"""The run file of an import: the checkpoint's model and optimizer, and the command that trains on. No torch.

Values that only the user knows are comments there, and flags with a word in capitals in the command.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from pydantic import ValidationError

from megalite.checkpoint.folder import read_manifest
from megalite.checkpoint.manifest import WEIGHT, Manifest
from megalite.config.sections.schema import OptimizerConfig
from megalite.config.sections.shape_settings import as_settings
from megalite.config.sections.toml import format_table, format_value
from megalite.convert.huggingface.origin import find_origin
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES
from megalite.topology.shape import ModelShape

_ADAM = ("learning_rate", "betas", "eps", "weight_decay", "gradient_clipping")


def write_import_run_file(checkpoint: Path, precision: str | None = None) -> Iterator[str]:
    """Write RUN/run.toml of an imported checkpoint, unless the file exists; yield the lines to print.

    Weights alone are no checkpoint to resume: then no file is written, and the command starts a run from an export.
    precision: training.precision of the other program's run, where it is known. Raises CheckpointError where the file
    cannot be written.
    """
    manifest, run_folder = read_manifest(checkpoint), checkpoint.parent.parent
    if manifest.tensors.keys() == {WEIGHT}:
        yield (
            f"next: megalite convert export {quote(str(run_folder))} MODEL && megalite train --model.weights MODEL"
            " --data.source TEXT"
        )
        return
    path, training = run_folder / "run.toml", _training(manifest, precision)
    command = f"next: megalite train {quote(str(path))}"
    if path.exists():
        yield f"{path} existed before and stays as it is"
        yield command
        return
    tokenizer = run_folder / "tokenizer"
    flags = {"data.source": "TEXT", "training.steps": "N"}
    if not tokenizer.is_dir():
        flags["tokenizer.path"] = "TOKENIZER"
    flags |= {
        f"training.{name}": word
        for name, word in (("sequence_length", "LENGTH"), ("global_batch_size", "BATCH"))
        if name not in training
    }
    lines = [
        f"# The model and the optimizer of {format_value(str(checkpoint))}, for megalite train.",
        "# Still to say, here or as flags: "
        + ", ".join(f"{name} = {word}" for name, word in flags.items())
        + ".",
        f"# training.steps counts the whole run, of which {manifest.step:,} steps are done.",
        "# Dropout that [model] does not name is 0; megalite adopt FOLDER reads the old run's arguments.",
        *("", *format_table("run", {"folder": str(run_folder.resolve())})),
        *("", *format_table("model", _model(manifest.model, find_origin(checkpoint)))),
        *("", *_optimizer_lines(manifest.config.get("optimizer") or {})),
        *("", *format_table("training", training)),
    ]
    if tokenizer.is_dir():
        said = manifest.config.get("tokenizer") or {}
        lines += ["", *format_table("tokenizer", {"path": str(tokenizer.resolve()), **said})]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
    yield f"{path}: a run file with the checkpoint's model and optimizer"
    yield " ".join([command, *(f"--{name} {word}" for name, word in flags.items())])


def _model(shape: ModelShape, origin: Path | None) -> dict[str, Any]:
    """Return all settings of [model] that give the shape, and the dropout of the config.json that came along."""
    settings = {name: value for name, value in as_settings(vars(shape)).items() if name != "adapter"}
    config = {} if origin is None else json.loads(origin.read_text(encoding="utf-8"))
    same = config.get("model_type") == shape.family
    return settings | (FAMILIES[shape.family].read_dropout(config) if same else {})


def _optimizer_lines(known: Mapping[str, Any]) -> Iterator[str]:
    """Yield [optimizer]: what the checkpoint says, and as comments the defaults that count for the rest."""
    said = {name: value for name, value in known.items() if _is_setting(name, value)}
    yield from format_table("optimizer", said)
    for name in _ADAM:
        if name not in said:
            default = format_value(OptimizerConfig.model_fields[name].default)
            yield f"# {name} = {default}  (megalite's default; the checkpoint does not say the old run's)"


def _is_setting(name: str, value: Any) -> bool:
    try:
        OptimizerConfig(**{name: value})
    except ValidationError:
        return False
    return True


def _training(manifest: Manifest, precision: str | None) -> dict[str, Any]:
    """Return precision, batch and length, as far as the counters of the checkpoint say them."""
    step, samples, tokens = (manifest.trainer_state.get(name, 0) for name in ("step", "samples", "tokens"))
    settings: dict[str, Any] = {"precision": precision or "auto", "micro_batch_size": 1}
    if step and samples and samples % step == 0:
        settings["global_batch_size"] = samples // step
    if samples and tokens and tokens % samples == 0 and tokens // samples <= manifest.model.longest_sequence:
        settings["sequence_length"] = tokens // samples
    return settings
