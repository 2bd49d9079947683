"""The settings that differ from those of the checkpoint that a run goes on from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.folder import read_manifest
from megalite.config.flat import flat, flat_settings
from megalite.config.schema import RunConfig, RunSection
from megalite.data.stream_files import StreamFile
from megalite.errors import ConfigError, Problem, listed

# Where and how a run computes, and how long: none of it makes another run. Data and tokenizer are compared by content.
_FREE_SECTIONS = (
    "parallel",
    "deepspeed",
    "tokenizer",
    "data",
    "validation",
    "checkpoint",
    "monitor",
    "launch",
)
_FREE = {
    "run.folder",
    *("model.preset", "model.hf_config", "model.weights", "model.kernels", "model.chunked_loss"),
    *("training.steps", "training.epochs", "training.stop_after", "training.micro_batch_size"),
    *("training.micro_batches", "training.precision", "training.accumulation", "training.threads"),
    *("training.compile", "training.recompute", "training.recompute_layers", "training.recompute_ratio"),
}


@dataclass(frozen=True)
class Changed:
    """A setting with its value in the checkpoint and its value now."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def changed_settings(written: Mapping[str, Any], config: RunConfig) -> list[Changed]:
    """Return the settings of model, training, optimizer and seed that are not those of a checkpoint's manifest.

    Settings that the checkpoint's version of megalite did not know have no part.
    """
    before, now = dict(flat(written)), flat_settings(config)
    return [
        Changed(key, before[key], now[key])
        for key in now.keys() & before.keys()
        if before[key] != now[key] and key not in _FREE and key.split(".")[0] not in _FREE_SECTIONS
    ]


def require_same_order(config: RunConfig, resumed: Path | None) -> None:
    """Refuse to resume where samples would not go on behind those seen: with data.curriculum or data.length_buckets.

    Raises ConfigError if the weights of earlier steps, the buckets or the size of a step changed.
    """
    if resumed is None:
        return
    manifest = read_manifest(resumed)
    before, now = manifest.config.get("data", {}), config.model_dump(mode="json")["data"]
    used = [name for name in ("curriculum", "length_buckets") if before.get(name) or now[name]]
    if not used:
        return
    step, samples = manifest.trainer_state["step"], manifest.trainer_state["samples"]
    size, length = config.batch.global_batch_size, config.training.sequence_length
    problems = []
    if samples != step * size:
        problems.append(
            Problem(
                "training.global_batch_size",
                f"{size} is not the size of the {step} steps before {resumed}, which had {samples} sequences, and "
                f"data.{used[0]} counts steps of one size",
                f"use {samples // step}" if step and samples % step == 0 else f"delete data.{used[0]}",
            )
        )
    if _weights_up_to(step, before) != _weights_up_to(step, now):
        problems.append(
            Problem(
                "data.curriculum",
                f"the weights up to step {step} are not those of {resumed}, so samples would be repeated or left out",
                f"change the weights with a [[data.curriculum]] table of step {step + 1} or later",
            )
        )
    buckets = before.get("length_buckets", 0)
    if step and buckets != now["length_buckets"]:
        message = (
            f"{now['length_buckets']} is not that of {resumed}, so samples would be repeated or left out"
        )
        problems.append(Problem("data.length_buckets", message, f"use {buckets}, or a new run.folder"))
    written = manifest.config.get("training", {}).get("sequence_length", length)
    if step and now["length_buckets"] and written != length:
        message = f"{length} is not that of {resumed}, and data.length_buckets depend on it"
        problems.append(Problem("training.sequence_length", message, f"use {written}, or a new run.folder"))
    if problems:
        raise ConfigError(problems)


def require_same_stream(config: RunConfig, files: Sequence[StreamFile], resumed: Path | None) -> None:
    """Refuse to resume where streamed text would not go on behind what was read. files: () without data.streaming.

    Raises ConfigError if data.streaming, the files or the global batch size are not those of the checkpoint.
    """
    if resumed is None or (manifest := read_manifest(resumed)).step == 0:
        return
    before, size = manifest.stream, config.batch.global_batch_size
    if before is None or not files:
        if before is not None or files:
            was = "streamed" if before else "not streamed"
            message = f"the {manifest.step} steps before {resumed} were {was}, so text would be repeated or left out"
            remedy = f"use {'true' if before else 'false'}, or a new run.folder"
            raise ConfigError([Problem("data.streaming", message, remedy)])
        return
    problems = []
    now = tuple((file.path.name, file.size_bytes) for file in files)
    if now != before.files:
        message = f"{_first_difference(before.files, now)}, and the places where {resumed} goes on depend on the files"
        problems.append(Problem("data.source", message, "name the same files, or use a new run.folder"))
    if size != len(before.lanes):
        message = f"{size} is not that of {resumed}, and each sequence of it streams a part of its own"
        remedy = f"use {len(before.lanes)}, or a new run.folder"
        problems.append(Problem("training.global_batch_size", message, remedy))
    if problems:
        raise ConfigError(problems)


def _first_difference(before: Sequence[tuple[str, int]], now: Sequence[tuple[str, int]]) -> str:
    """Say how two lists of files, each its name and size in bytes, differ."""
    if len(before) != len(now):
        return f"{len(now)} files are not the {len(before)} of the steps before"
    (name, was), (other, size) = next(pair for pair in zip(before, now, strict=True) if pair[0] != pair[1])
    if name != other:
        return f"{other} is in the place of {name}"
    return f"{name} has {size:,} bytes, not {was:,}"


def _weights_up_to(step: int, data: Mapping[str, Any]) -> list[tuple[int, list[float]]]:
    """Return (first step, weights of the data sets) of each change that the first `step` steps have."""
    first = [float(part["weight"]) for part in data.get("blend") or ()]
    later = [(part["step"], list(map(float, part["weights"]))) for part in data.get("curriculum") or ()]
    return [(1, first), *(each for each in later if each[0] <= step)]


def require_same_run(config: RunConfig, resumed: Path | None) -> None:
    """Refuse to join two runs that have nothing in common but the default folder.

    Raises ConfigError if run.folder was left at its default and the run there has other settings.
    """
    default = RunSection.model_fields["folder"].default
    if resumed is None or config.checkpoint.resume != "auto" or config.run.folder != default:
        return
    changed = sorted(map(str, changed_settings(read_manifest(resumed).config, config)))
    if changed:
        problem = Problem(
            "run.folder",
            f"{default} holds a run with other settings ({listed(changed)})",
            f"start a new run with --run.folder runs/second, or go on from there with --checkpoint.resume {resumed}",
        )
        raise ConfigError([problem])
