"""The settings that differ from those of the checkpoint that a run goes on from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.folder import read_manifest
from megalite.config.flat import flat, flat_settings
from megalite.config.schema import RunConfig, RunSection
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
