"""Facts of a run beside its curves, as its folder has them; a file that cannot be read is a note, no error."""

import json
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.checkpoint.folder import BEST, LATEST, named_by, published_checkpoints
from megalite.config.load import load_run
from megalite.config.output.dotted_keys import flat
from megalite.config.output.summary import context_line, parameters_line
from megalite.config.sections.derived import vocabulary
from megalite.config.sections.describe import section_models
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.unchecked import DEFAULT, DERIVED
from megalite.errors import MegaliteError
from megalite.launcher.control.failures import FailureReport
from megalite.planner.memory import largest_rank
from megalite.planner.planned_run import PlannedRun

UNKNOWN_ORIGIN = "set or derived"
"""The origin of a value that is no default, in a run that did not record origins."""
# The errors of a file with any content, such as the first half of a table.
_NO_SUCH_CONTENT = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


@dataclass
class RunFacts:
    """Facts of one run; notes: what could not be read.

    settings: dotted key -> value, as text. origins: dotted key -> origin. starts: as train/start_record.py writes them.
    layout: sizes, stages and ranks; memory: the predicted bytes of the fullest rank by kind; None: not known.
    checkpoints: step, bytes, time, whether latest or best. export: file -> bytes. failures: time, rank, text.
    """

    settings: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] | None = None
    memory: dict[str, float] | None = None
    parameters: str = ""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    export: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_facts(folder: Path, *, on_device: bool = False) -> RunFacts:
    """Read a run folder. on_device: whether its records show that it trained on an accelerator."""
    facts = RunFacts()
    facts.starts = list(_starts(folder / "starts.jsonl", facts.notes))
    _read_settings(folder / "run.toml", facts)
    config = _config(folder / "run.toml", facts) if facts.settings else None
    if config is not None:
        facts.layout = _layout(config)
        facts.parameters = parameters_line(config)
        _or_note(facts, "memory", lambda: _predict(config, facts, on_device=on_device))
    _or_note(facts, "checkpoints", lambda: facts.checkpoints.extend(_checkpoints(folder / "checkpoints")))
    _or_note(facts, "export", lambda: facts.export.update(_sizes(folder / "export")))
    _or_note(facts, "failures", lambda: facts.failures.extend(_failures(folder / "failures")))
    return facts


def _or_note(facts: RunFacts, part: str, read: Callable[[], None]) -> None:
    try:
        read()
    except (OSError, MegaliteError, *_NO_SUCH_CONTENT) as error:
        facts.notes.append(f"{part} cannot be shown: {_reason(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _starts(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        notes.append(f"{path.name} cannot be read: {_reason(error)}")
        return
    for number, line in enumerate(lines, start=1):
        try:
            start = json.loads(line, parse_constant=_refuse)
            shown = {name: start[name] for name in ("time", "step")}
            if not all(isinstance(value, int | float) for value in shown.values()):
                raise ValueError("no time or step")
            yield start
        except _NO_SUCH_CONTENT:
            notes.append(f"line {number} of {path.name} is damaged")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _read_settings(path: Path, facts: RunFacts) -> None:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        facts.notes.append("there is no run.toml: the settings are not known")
        return
    except (OSError, *_NO_SUCH_CONTENT) as error:
        facts.notes.append(f"run.toml cannot be read: {_reason(error)}")
        return
    facts.settings = dict(flat(tables)) if tables else {}
    if not tables:
        facts.notes.append("run.toml has no settings")
    recorded = facts.starts[-1].get("origins") if facts.starts else None
    origins: Mapping[str, str] | None = recorded if isinstance(recorded, Mapping) else None
    defaults = _defaults()
    for key, value in facts.settings.items():
        setting = ".".join(key.split("[")[0].split(".")[:2])
        if origins is not None:
            origin = str(origins.get(setting, DEFAULT if defaults.get(key) == value else DERIVED))
        else:
            origin = DEFAULT if defaults.get(key) == value else UNKNOWN_ORIGIN
        facts.origins[key] = origin


def _defaults() -> dict[str, str]:
    """Return dotted key -> default, as text, for the settings that have one."""
    tables = {
        section: {
            name: info.get_default(call_default_factory=True)
            for name, info in model.model_fields.items()
            if not info.is_required()
        }
        for section, model in section_models().items()
    }
    return dict(flat(json.loads(json.dumps(tables, default=str))))


def _config(path: Path, facts: RunFacts) -> RunConfig | None:
    """Return the resolved run. Without model.weights, whose shape it has already, and which may be on the Hub."""
    try:
        return load_run(path, ["--model.weights", "unset"]).config
    except MegaliteError as error:
        facts.notes.append(
            "layout and predicted memory are not shown: this version of megalite refuses run.toml: "
            + _reason(error)
        )
        return None


def _layout(config: RunConfig) -> dict[str, Any]:
    layout, split = config.layout, config.split
    return {
        "text": layout.text,
        "ranks": layout.world_size,
        "sizes": layout.sizes,
        "zero_stage": config.zero_stage,
        "context": context_line(config),
        "layers": [[*split.layers_of(stage)] for stage in range(layout.pipeline)],
        "places": [layout.named_places(rank) for rank in range(layout.world_size)],
    }


def _predict(config: RunConfig, facts: RunFacts, *, on_device: bool) -> None:
    rows, start = vocabulary(config), facts.starts[-1] if facts.starts else {}
    if rows is None or config.training.precision == "auto":
        return
    on_cpu = start["device"] == "cpu" if "device" in start else not on_device
    plain = bool(start.get("plain_torch", False))
    memory = largest_rank(PlannedRun.of(config, rows, on_cpu=on_cpu, plain_torch=plain))
    kinds = {kind: size for kind, size in memory.kinds.items() if size}
    facts.memory = {**kinds, "host": memory.host, "peak": memory.peak}


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    marks = {name: named_by(folder / name) for name in (LATEST, BEST)}
    rows = []
    for step, path in sorted(published_checkpoints(folder).items()):
        # Old checkpoints of a running run are deleted meanwhile.
        with suppress(FileNotFoundError):
            named = [
                name for name, marked in marks.items() if marked is not None and marked.name == path.name
            ]
            rows.append(
                {
                    "step": step,
                    "bytes": sum(_sizes(path).values()),
                    "time": path.stat().st_mtime,
                    "marks": named,
                }
            )
    return rows


def _sizes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _failures(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            report = FailureReport.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, *_NO_SUCH_CONTENT) as error:
            rows.append({"time": 0.0, "rank": path.stem, "text": f"the report is damaged: {_reason(error)}"})
            continue
        text = report.headline + (" (a consequence of another rank's end)" if report.secondary else "")
        step = "" if report.step is None else f" after step {report.step:,}"
        rows.append({"time": report.time, "rank": report.who, "text": f"{text}{step}"})
    return sorted(rows, key=lambda row: row["time"])


def stamp(seconds: float) -> str:
    """Return seconds since the epoch as a local date and time; "" for 0, and for what is no time."""
    if seconds:
        with suppress(ValueError, OverflowError, OSError):
            return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return ""
