"""From RUN.toml and flags to a resolved RunConfig, or to one ConfigError with everything that is wrong."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config.deepspeed.read import apply_deepspeed
from megalite.config.draft import DEFAULT, DERIVED, Draft
from megalite.config.flags import COMMAND_LINE, UNSET, apply_overrides
from megalite.config.huggingface import apply_hf_config
from megalite.config.presets import apply_preset, require_shape
from megalite.config.rules.batch import plan_batch
from megalite.config.rules.computation import notes_of
from megalite.config.rules.every import problems_of
from megalite.config.rules.pipeline import chunks_per_stage
from megalite.config.schema import RunConfig
from megalite.config.toml import format_table, format_value, read_toml, shown
from megalite.config.validate import Facts, validate
from megalite.errors import ConfigError, Problem
from megalite.launcher.detect import rank_info, without_local_rank

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedRun:
    """A resolved run, with the origin of every `section.key` that is not a default, and what the user should know."""

    config: RunConfig
    origins: Mapping[str, str]
    notes: tuple[str, ...]

    def origin(self, key: str) -> str:
        """A file, a flag, a preset, a key of DeepSpeed's JSON, "default" or "derived"."""
        return self.origins.get(key, DEFAULT)


def load_run(
    path: Path | str | None, overrides: Sequence[str] = (), world_size: int | None = None
) -> LoadedRun:
    """Read RUN.toml, lay `["--section.key", "value", ...]` over it, fill in what follows, check all of it.

    world_size: the ranks that a launcher started; None when megalite starts its own, as many as the layout has.
    Nothing is left open but what the tokenizer (model.vocab_size), the data (steps of training.epochs) and the
    machine (training.threads, training.precision) will say. Raises ConfigError with every problem, those of the
    schema and those that span settings.
    """
    draft = Draft(COMMAND_LINE if path is None else str(path))
    if path is not None:
        _read_file(draft, Path(path))
    apply_overrides(draft, overrides)
    apply_preset(draft)
    apply_hf_config(draft)
    require_shape(draft)
    apply_deepspeed(draft, Path() if path is None else Path(path).parent)
    facts = validate(draft, world_size)
    problems = dict.fromkeys([*draft.problems, *problems_of(facts)])
    if problems:
        raise ConfigError(list(problems), draft.source)
    resolved = _resolved(facts)
    for key, value in resolved.items():
        section, name = key.split(".")
        if value != getattr(getattr(facts, section), name):
            draft.set(section, name, value, DERIVED)
    return LoadedRun(RunConfig.model_validate(draft.values), draft.origins, (*draft.notes, *notes_of(facts)))


def load_config(path: Path | str | None, *flags: str, **settings: Any) -> RunConfig:
    """Read RUN.toml and resolve it for the ranks that a launcher started, if one did.

    settings: laid over the file, section by section: training={"steps": 100}, model={"preset": "small"}.
    flags: over both, in the words of the command line: "--training.steps", "100".
    Raises ConfigError with every problem.
    """
    info = rank_info()
    loaded = load_run(
        path, [*_as_flags(settings), *without_local_rank(flags)], info.world_size if info else None
    )
    if info is None or info.rank == 0:
        for note in loaded.notes:
            logger.warning(note)
    return loaded.config


def _as_flags(settings: Mapping[str, Any]) -> Iterator[str]:
    """What a call gives, section by section, in the words of the command line."""
    for section, table in settings.items():
        if not isinstance(table, Mapping) and "." not in section:
            problem = Problem(
                section, f"{shown(table)} stands for a section", f"write {section}={{key: value}}"
            )
            raise ConfigError([problem], "the call")
        yield from _flags_of(section, table)


def _flags_of(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flags_of(f"{name}.{key}", each)
    else:
        value = str(value) if isinstance(value, Path) else value
        try:
            yield f"--{name}={UNSET if value is None else format_value(value)}"
        except TypeError as error:
            raise ConfigError([Problem(name, str(error), "use numbers, text, lists")], "the call") from None


def write_resolved(config: RunConfig, path: Path) -> None:
    """Write a resolved run as RUN.toml: loading it gives an equal RunConfig, under the same number of ranks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("\n".join(resolved_lines(config)) + "\n", encoding="utf-8")
    partial.replace(path)


def resolved_lines(config: RunConfig) -> list[str]:
    lines: list[str] = []
    for name, section in config.model_dump().items():
        if section is None:
            continue
        if name == "training":
            # It follows from the other two, so that either of these can be changed by a flag.
            section.pop("micro_batches")
        lines += [*format_table(name, section), ""]
    return lines[:-1]


def _read_file(draft: Draft, path: Path) -> None:
    draft.values = read_toml(path)
    for section, table in draft.values.items():
        for key in table if isinstance(table, dict) else ():
            draft.origins[f"{section}.{key}"] = draft.source


def _resolved(facts: Facts) -> dict[str, Any]:
    """What follows from the settings of a run without problems."""
    plan, model = plan_batch(facts), facts.model
    heads = model.num_attention_heads
    return {
        "parallel.data": plan.data,
        "parallel.virtual_stages": chunks_per_stage(facts),
        "training.micro_batch_size": plan.micro_batch_size,
        "training.micro_batches": plan.micro_batches,
        "training.global_batch_size": plan.global_batch_size,
        "model.num_key_value_heads": model.num_key_value_heads or heads,
        "model.head_dim": model.head_dim or model.hidden_size // heads,
    }
