"""Settings of a row's run and of its reference process, and the check whether a row is legal.

megalite's own configuration decides what is legal: a partial row is checked by the rules with the settings of the open
axes unknown, a complete row is loaded as a run.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, cast
from unittest import mock

from megalite.config.load import load_run
from megalite.config.rules import every
from megalite.config.rules.adapter import an_adapter_has_a_model
from megalite.config.sections.checked import CheckedRun, Unknown
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.toml import format_value
from megalite.config.sections.unchecked import SettingsDraft
from megalite.config.validate import validate
from megalite.errors import ConfigError, Problem
from tests.support.matrix.axes import AXES, BASE, COMPILED_LAYOUTS, ELSEWHERE, Row, Settings

# The axes on which the number of layers depends.
CUTS = ("layout", "chunks", "layers")
LEAST_LAYERS = 4
MOST_RANKS = 8
EXPERT_RANKS = ("parallel.expert", "parallel.expert_tensor")


def settings_of(row: Row) -> Settings:
    """Return the settings of a row's run; the row may be partial."""
    settings = dict(BASE)
    for axis, value in row.items():
        settings.update(AXES[axis].values[value])
    if all(axis in row for axis in CUTS):
        settings.update(_layers(settings, row["layers"]))
    return settings


def _layers(settings: Settings, layers: str) -> Settings:
    """Return the number of layers, at least one per chunk, split evenly or with more layers at the front."""
    chunks = settings["parallel.pipeline"] * settings["parallel.virtual_stages"]
    if layers == "balanced":
        return {"model.num_hidden_layers": max(LEAST_LAYERS, chunks)}
    given = [1 + max(1, LEAST_LAYERS - chunks)] + [1] * (chunks - 1)
    return {"model.num_hidden_layers": sum(given), "parallel.layers_per_stage": given}


def ranks_of(settings: Settings) -> int:
    """Return the number of ranks; of axes that are open, one."""
    return prod(settings.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "data", "context"))


def reference_of(row: Row) -> Settings:
    """Return the settings of a row's reference process: the same model and global batch, in one micro batch."""
    settings = dict(settings_of(row))
    sequences = [
        settings[key] for key in ("training.micro_batch_size", "training.micro_batches", "parallel.data")
    ]
    plain = {
        axis: value if AXES[axis].changes_numbers else next(iter(AXES[axis].values))
        for axis, value in row.items()
    }
    batch = {"training.micro_batch_size": prod(sequences), "training.micro_batches": 1}
    depth = {"model.num_hidden_layers": settings["model.num_hidden_layers"]}
    alone = {key: value for key, value in settings_of(plain).items() if key not in EXPERT_RANKS}
    return {**alone, **batch, **depth}


def flags_of(settings: Settings) -> list[str]:
    """Return the settings as flags of `megalite train`."""
    return [text for key, value in settings.items() for text in (f"--{key}", format_value(value))]


def config_of(settings: Settings) -> RunConfig:
    """Return the resolved run. Raises ConfigError if a rule refuses it."""
    with _any_base():
        return load_run(None, flags_of(settings)).config


@contextmanager
def _any_base() -> Iterator[None]:
    """Let an adapter stand beside the random weights of the rows."""
    rules = tuple(rule for rule in every.RULES if rule is not an_adapter_has_a_model)
    with mock.patch.object(every, "RULES", rules):
        yield


def illegal(row: Row) -> str | None:
    """Return why no run can have these values together; None if one may (for a complete row: does)."""
    return next(_reasons(row), None)


def _reasons(row: Row) -> Iterator[str]:
    for values in ELSEWHERE:
        if values.items() <= row.items():
            yield f"{dict(values)} is tested elsewhere"
    yield from _not_worth_a_row(row)
    if len(row) < len(AXES):
        with _any_base():
            yield from map(_reason, every.problems_of(_checked(row)))
        return
    try:
        config_of(settings_of(row))
    except ConfigError as error:
        yield from map(_reason, error.problems)


def _not_worth_a_row(row: Row) -> Iterator[str]:
    """Yield why a row that the configuration allows needs no run: mostly because it equals another row."""
    settings = settings_of(row)
    stages, schedule = settings.get("parallel.pipeline"), settings.get("parallel.schedule")
    if stages == 1 and schedule not in (None, "1f1b"):
        yield "one stage runs no schedule"
    if row.get("layers") == "uneven" and stages == settings.get("parallel.virtual_stages") == 1:
        yield "one chunk cannot be uneven"
    if settings.get("parallel.tensor") == 1 and row.get("sequence") == "on":
        yield "one tensor-parallel rank has the whole sequence"
    if row.get("compile") == "on" and row.get("layout", COMPILED_LAYOUTS[0]) not in COMPILED_LAYOUTS:
        yield "compiling takes long, and other layouts show no more of it"
    if ranks_of(settings) > MOST_RANKS:
        yield f"more than {MOST_RANKS} ranks take long, and show no more of either axis"
    if row.get("family") in ("gpt2", "gemma") and row.get("experts", "none") != "none":
        yield "experts are gated by silu"
    if row.get("accumulation") == "model" and row.get("precision") in ("fp64", "fp32"):
        yield "the model's own type accumulates already"


def _checked(row: Row) -> CheckedRun:
    """Return the known settings of a partial row as a draft."""
    draft = SettingsDraft("the row")
    for key, value in settings_of(row).items():
        section, *path = key.split(".")
        table = draft.section(section)
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = value
    run = validate(draft, None)
    still_open = open_keys(frozenset(row))
    sections = {
        name: _Open(getattr(run, name), still_open[name])
        for name in ("model", "adapter", "parallel", "training", "optimizer", "data", "preference")
    }
    deepspeed = _OpenTable() if "deepspeed" in still_open else run.deepspeed
    return replace(run, **cast(dict[str, Any], sections), deepspeed=deepspeed)


@cache
def open_keys(named: frozenset[str]) -> Mapping[str, frozenset[str]]:
    """Return section -> the keys that open axes will set."""
    keys = {
        key for axis in AXES.keys() - named for settings in AXES[axis].values.values() for key in settings
    }
    if not named.issuperset(CUTS):
        keys |= {"model.num_hidden_layers", "parallel.layers_per_stage"}
    by_section: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        section, name, *_ = key.split(".")
        by_section[section].add(name)
    return defaultdict(frozenset, {section: frozenset(names) for section, names in by_section.items()})


class _Open:
    """A section with unknown keys; reading one raises Unknown, so that the rule is skipped."""

    def __init__(self, section: Any, still_open: frozenset[str]):
        self._section, self._open = section, still_open

    def __getattr__(self, name: str) -> Any:
        if name in self._open:
            raise Unknown(name)
        return getattr(self._section, name)


class _OpenTable(dict[str, Any]):
    """DeepSpeed's JSON with all keys unknown."""

    def get(self, key: str, default: Any = None) -> Any:
        raise Unknown(key)

    __getitem__ = get


def _reason(problem: Problem) -> str:
    return f"{problem.key}: {problem.message}"
