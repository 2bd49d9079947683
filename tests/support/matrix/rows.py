"""From a row of the table to the settings of its run and of the one process it is held against; which rows are legal.

Legal is what megalite's own configuration allows: a row in the making is asked of the rules with the settings of the
axes still open unknown, a whole one is loaded as a run.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, cast

from megalite.config.draft import Draft
from megalite.config.facts import Facts, Unknown
from megalite.config.load import load_run
from megalite.config.rules.every import problems_of
from megalite.config.schema import RunConfig
from megalite.config.toml import format_value
from megalite.config.validate import validate
from megalite.errors import ConfigError, Problem
from tests.support.matrix.axes import AXES, BASE, COMPILED_LAYOUTS, ELSEWHERE, Row, Settings

# What the number of layers depends on.
CUTS = ("layout", "chunks", "layers")
LEAST_LAYERS = 4


def settings_of(row: Row) -> Settings:
    """Of the run of a row, whole or in the making."""
    settings = dict(BASE)
    for axis, value in row.items():
        settings.update(AXES[axis].values[value])
    if all(axis in row for axis in CUTS):
        settings.update(_layers(settings, row["layers"]))
    return settings


def _layers(settings: Settings, layers: str) -> Settings:
    """As many layers as there are chunks or a few more, cut evenly or with more of them at the front."""
    chunks = settings["parallel.pipeline"] * settings["parallel.virtual_stages"]
    if layers == "balanced":
        return {"model.num_hidden_layers": max(LEAST_LAYERS, chunks)}
    given = [1 + max(1, LEAST_LAYERS - chunks)] + [1] * (chunks - 1)
    return {"model.num_hidden_layers": sum(given), "parallel.layers_per_stage": given}


def reference_of(row: Row) -> Settings:
    """Of the one process that a row is held against: the same model and global batch, all of it at once."""
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
    return {**settings_of(plain), **batch, **depth}


def flags_of(settings: Settings) -> list[str]:
    """As a user would write them behind `megalite train`."""
    return [text for key, value in settings.items() for text in (f"--{key}", format_value(value))]


def config_of(settings: Settings) -> RunConfig:
    """The resolved run. Raises ConfigError where a rule refuses it."""
    return load_run(None, flags_of(settings)).config


def illegal(row: Row) -> str | None:
    """Why no run has these values together; None where one may (for a whole row: does)."""
    return next(_reasons(row), None)


def _reasons(row: Row) -> Iterator[str]:
    for values in ELSEWHERE:
        if values.items() <= row.items():
            yield f"{dict(values)} is tested elsewhere"
    yield from _not_worth_a_row(row)
    if len(row) < len(AXES):
        yield from map(_reason, problems_of(_facts(row)))
        return
    try:
        config_of(settings_of(row))
    except ConfigError as error:
        yield from map(_reason, error.problems)


def _not_worth_a_row(row: Row) -> Iterator[str]:
    """What the configuration allows and what would run as another row does."""
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
    if row.get("accumulation") == "model" and row.get("precision") in ("fp64", "fp32"):
        yield "the model's own type accumulates already"


def _facts(row: Row) -> Facts:
    """What is known of a row in the making."""
    draft = Draft("the row")
    for key, value in settings_of(row).items():
        section, *path = key.split(".")
        table = draft.section(section)
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = value
    facts = validate(draft, None)
    still_open = open_keys(frozenset(row))
    sections = {
        name: _Open(getattr(facts, name), still_open[name])
        for name in ("model", "parallel", "training", "optimizer")
    }
    deepspeed = _OpenTable() if "deepspeed" in still_open else facts.deepspeed
    return replace(facts, **cast(dict[str, Any], sections), deepspeed=deepspeed)


@cache
def open_keys(named: frozenset[str]) -> Mapping[str, frozenset[str]]:
    """Section -> its keys that an axis still to be named will set."""
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
    """A section of which some keys are not known yet; a rule that reads one of them says nothing."""

    def __init__(self, section: Any, still_open: frozenset[str]):
        self._section, self._open = section, still_open

    def __getattr__(self, name: str) -> Any:
        if name in self._open:
            raise Unknown(name)
        return getattr(self._section, name)


class _OpenTable(dict[str, Any]):
    """The same for DeepSpeed's JSON, of which nothing is known."""

    def get(self, key: str, default: Any = None) -> Any:
        raise Unknown(key)

    __getitem__ = get


def _reason(problem: Problem) -> str:
    return f"{problem.key}: {problem.message}"
