"""Writes the page of one or several runs: what each section shows, filled into page.html, which escapes every text."""

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from math import isfinite
from typing import Any

from jinja2 import Environment, StrictUndefined

from megalite.config.output.summary import memory_text
from megalite.monitor.work import duration
from megalite.report.curves import MOST_CURVES, RunCurves, charts_of, curve_table
from megalite.report.run_facts import RunFacts, stamp
from megalite.version import __version__

_SECTIONS = {
    "validations": ("validation", "Validation"),
    "settings": ("settings", "Settings"),
    "layout": ("layout", "Layout"),
    "timeline": ("timeline", "Timeline"),
    "memory": ("memory", "Memory"),
    "checkpoints": ("checkpoints", "Checkpoints and export"),
    "environment": ("environment", "Environment"),
}
"""Field of a run's view -> anchor and name of its section."""
_VALIDATIONS, _CHECKPOINTS, _STARTS = 12, 20, 20
"""The rows of a table; a longer one has its first and its last rows."""
_LAYOUT_RANKS = 256
# They differ between any two runs, and say nothing about why.
_OWN_SETTINGS = ("run.folder", "monitor.run_name")


@dataclass(frozen=True)
class PageRun:
    """A run of the page. report: as RunFolderReader.report; timeline: the picture of a traced step, SVG."""

    name: str
    report: Mapping[str, Any]
    curves: RunCurves
    facts: RunFacts
    timeline: str = ""


@dataclass(frozen=True)
class Table:
    """A table of texts. numbers: the columns to set at the right."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = field(default_factory=frozenset)


def report_data(runs: Sequence[PageRun]) -> dict[str, Any]:
    """Return the data of the page, for programs; the curves are thinned as on it."""
    charts, left_out = charts_of([run.curves for run in runs])
    curves = curve_table(charts, [run.curves for run in runs])
    return {
        "made": time.time(),
        "megalite": __version__,
        "runs": [
            {
                "name": run.name,
                **run.report,
                **asdict(run.facts),
                "loss_spikes": _spikes(run.curves),
                "validations": [
                    [step, loss if isfinite(loss) else None]
                    for step, loss in run.curves.column("validation_loss")
                ],
                "records": len(run.curves.steps),
                "curves": table,
            }
            for run, table in zip(runs, curves, strict=True)
        ],
        "charts": [chart._asdict() for chart in charts],
        "metrics_left_out": left_out,
        "differences": _differences(runs),
    }


def report_page(runs: Sequence[PageRun]) -> str:
    """Return the page: one HTML file that needs nothing else."""
    charts, left_out = charts_of([run.curves for run in runs])
    curves = curve_table(charts, [run.curves for run in runs])
    drawn = {
        "runs": [{"name": run.name, **table} for run, table in zip(runs, curves, strict=True)],
        "charts": [{"title": c.title, "unit": c.unit, "metrics": c.metrics, "run": c.run} for c in charts],
    }
    views = [_view(run) for run in runs]
    differences = _differences(runs)
    sections = [("curves-of-runs", "Curves")] if charts else []
    for name, section in _SECTIONS.items():
        if any(view[name] for view in views):
            sections.append(section)
    if len(runs) > 1:
        sections.insert(1, ("differences", "Different settings"))
    script = f"\n{_file('page.js')}"
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_file("page.html")).render(
        title=f"Report: {', '.join(run.name for run in runs)}",
        version=__version__,
        made=stamp(time.time()),
        css=_file("page.css"),
        js=script,
        js_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # The parser of HTML looks for the end of a script before anything else.
        curves_json=json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        runs=views,
        overview=_overview_table(views),
        environment=_environment_table(views),
        sections=sections,
        has_curves=bool(charts),
        thinning=_thinning(runs, curves, left_out),
        differences=_difference_table(runs, differences),
        any_of=lambda name: any(view[name] for view in views),
    )


def _file(name: str) -> str:
    return resources.files("megalite.report").joinpath(name).read_text("utf-8")


def _view(run: PageRun) -> dict[str, Any]:
    report, facts = run.report, run.facts
    return {
        "name": run.name,
        "folder": report["run"],
        "state": report["state"],
        "detail": report["detail"],
        "facts": dict(_overview(run)),
        "alarms": [*report["alarms"], *_alarms(run)],
        "notes": facts.notes,
        "validations": _validations(run.curves),
        "settings": _settings(facts),
        "layout": _layout(facts.layout),
        "timeline": run.timeline,
        "memory": _memory(run),
        "checkpoints": _checkpoints(run),
        "export": _export(facts),
        "environment": _environment(facts),
        "starts": _starts(facts) if len(facts.starts) > 1 else None,
    }


def _overview_table(views: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row a run, with all facts that any of them has."""
    names = list(dict.fromkeys(name for view in views for name in view["facts"]))
    rows = [
        [view["name"], ": ".join(filter(None, (view["state"], view["detail"])))]
        + [view["facts"].get(name, "") for name in names]
        for view in views
    ]
    return Table("The runs", ["run", "state", *names], rows, frozenset(range(2, 2 + len(names))))


def _overview(run: PageRun) -> Iterable[tuple[str, str]]:
    report, curves = run.report, run.curves
    last = report["last_step"] or {}
    if report["step"] is not None:
        total = f" of {report['total_steps']:,}" if report["total_steps"] else ""
        yield "step", f"{report['step']:,}{total}"
    if last:
        yield "loss", _number(last.get("loss"), ".4f")
    best = report["lowest_validation"]
    if best:
        yield "lowest validation loss", f"{_number(best.get('validation_loss'), '.4f')} at {best['step']:,}"
    if last.get("tokens"):
        yield "tokens", f"{last['tokens']:,}"
    if curves.seconds and curves.seconds[-1]:
        yield "training time", duration(curves.seconds[-1])
    if report["seconds_left"] is not None and report["state"] in ("running", "saving"):
        yield "time left", duration(report["seconds_left"])
    if last.get("tokens_per_second") is not None:
        yield "tokens/s", f"{last['tokens_per_second']:,.0f}"
    if last.get("mfu") is not None:
        yield "MFU", f"{last['mfu']:.1%}"
    if run.facts.parameters:
        yield "parameters", run.facts.parameters.split(" ")[0]
    if run.facts.layout:
        yield "ranks", f"{run.facts.layout['ranks']:,}"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None or not isfinite(value) else format(value, form)


def _alarms(run: PageRun) -> Iterable[str]:
    """Yield spikes of the loss, lost ranks and restarts; the report has those of its last numbers."""
    if spikes := _spikes(run.curves):
        worst_step, worst = max(spikes, key=lambda spike: spike[1])
        steps = ", ".join(f"{step:,}" for step, _ in spikes[:8]) + (", ..." if len(spikes) > 8 else "")
        yield (
            f"the loss was a spike in {len(spikes):,} {'step' if len(spikes) == 1 else 'steps'} ({steps}); the "
            f"largest, {worst:.4f} above the running median, at step {worst_step:,}"
        )
    for failure in run.facts.failures[-_STARTS:]:
        yield f"{stamp(failure['time'])} {failure['rank']}: {failure['text']}".strip()
    if restarts := run.facts.starts[1:]:
        steps = ", ".join(f"{start['step']:,}" for start in restarts[-8:])
        yield f"started {len(restarts) + 1} times, the last ones again after step {steps}"


def _spikes(curves: RunCurves) -> list[tuple[int, float]]:
    return [(step, spike) for step, spike in curves.column("loss_spike") if isfinite(spike)]


def _validations(curves: RunCurves) -> Table | None:
    losses = curves.column("validation_loss")
    if not losses:
        return None
    others = [name for name in curves.metrics if name.startswith("validation_") and name != "validation_loss"]
    names = ["validation_loss", *others]
    values = {name: dict(curves.column(name)) for name in names}
    best = min(losses, key=lambda row: row[1] if isfinite(row[1]) else float("inf"))[0]
    rows = [
        [f"{step:,}{' (lowest)' if step == best else ''}"]
        + [_number(values[name].get(step), ",.5g") for name in names]
        for step, _ in losses
    ]
    ends, said = _ends(rows, _VALIDATIONS)
    head = ["step", *(name.removeprefix("validation_").replace("_", " ") for name in names)]
    caption = f"{len(losses):,} validations{said}; the lowest at step {best:,}"
    return Table(caption, head, ends, frozenset(range(1, len(head))))


def _ends(rows: Sequence[Sequence[str]], most: int) -> tuple[Sequence[Sequence[str]], str]:
    """Return the first and the last rows of a long table, and a text that says so."""
    if len(rows) <= most:
        return rows, ""
    first = most // 3
    return [*rows[:first], *rows[first - most :]], f", of which the first {first} and the last {most - first}"


def _settings(facts: RunFacts) -> dict[str, list[tuple[str, str, str]]]:
    rows = [(key, value, facts.origins.get(key, "")) for key, value in facts.settings.items()]
    own = [row for row in rows if row[2] != "default"]
    groups = {f"{len(own)} settings that are no defaults": own, f"all {len(rows)} settings": rows}
    return {title: group for title, group in groups.items() if group}


def _differences(runs: Sequence[PageRun]) -> dict[str, list[str | None]]:
    """Return dotted key -> its value in each run, for the settings that are not the same in all that have settings."""
    known = [run.facts.settings for run in runs if run.facts.settings]
    if len(known) < 2:
        return {}
    keys = dict.fromkeys(key for settings in known for key in settings)
    return {
        key: [run.facts.settings.get(key) for run in runs]
        for key in keys
        if key not in _OWN_SETTINGS and len({settings.get(key) for settings in known}) > 1
    }


def _difference_table(runs: Sequence[PageRun], differences: Mapping[str, list[str | None]]) -> Table | None:
    rows = [
        [key, *("not set" if value is None else value for value in values)]
        for key, values in differences.items()
    ]
    head = ["setting", *(run.name for run in runs)]
    return Table("Settings that are not the same in all runs", head, rows) if rows else None


def _layout(layout: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return stages as columns, replicas as rows and the ranks of each; the first replicas of a large one."""
    if layout is None:
        return None
    stages, replicas = layout["sizes"]["pp"], layout["sizes"]["dp"]
    shown = max(1, min(replicas, _LAYOUT_RANKS * replicas // layout["ranks"]))
    cells: list[list[list[str]]] = [[[] for _ in range(stages)] for _ in range(shown)]
    for rank, place in enumerate(layout["places"]):
        if place["dp"] < shown:
            inner = ", ".join(
                f"{axis} {at}"
                for axis, at in place.items()
                if axis not in ("pp", "dp") and layout["sizes"][axis] > 1
            )
            cells[place["dp"]][place["pp"]].append(f"rank {rank}{f': {inner}' if inner else ''}")
    zero = f", ZeRO {layout['zero_stage']}" if layout["zero_stage"] else ""
    hidden = replicas - shown
    return {
        "text": f"{layout['ranks']:,} {'rank' if layout['ranks'] == 1 else 'ranks'}: {layout['text']}{zero}",
        "stages": [f"stage {at}: {_layers(layers)}" for at, layers in enumerate(layout["layers"])],
        "rows": [{"name": f"replica {at}", "cells": row} for at, row in enumerate(cells)],
        "context": layout["context"],
        "note": f"{hidden:,} more replicas with the same stages" if hidden else "",
    }


def _layers(layers: Sequence[int]) -> str:
    if not layers:
        return "no layer"
    consecutive = [*layers] == [*range(layers[0], layers[-1] + 1)]
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"layers {layers[0]} to {layers[-1]}" if consecutive else f"layers {', '.join(map(str, layers))}"


def _memory(run: PageRun) -> dict[str, Any] | None:
    """Return what was predicted by kind, and the measured peak, with the share of the largest number."""
    predicted = run.facts.memory
    sizes = {name: size for name, size in (predicted or {}).items() if name not in ("peak", "host") and size}
    rows = {f"{kind}, predicted": size for kind, size in sizes.items()}
    if predicted:
        rows["peak of a step, predicted"] = predicted["peak"]
        if predicted["host"]:
            rows["on the host, predicted"] = predicted["host"]
    measured = {"memory_bytes": "peak, measured", "reserved_bytes": "reserved by the allocator, measured"}
    on_device = "reserved_bytes" in run.curves.metrics
    for metric, name in measured.items():
        values = [value for _, value in run.curves.column(metric) if isfinite(value)]
        if values:
            rows[name] = max(values)
    if not rows:
        return None
    most = max(rows.values()) or 1
    caption = "Every kind at its own highest moment, so their sum may exceed the peak."
    if not on_device and "peak, measured" in rows:
        caption += " On a CPU the measured peak is that of the process, with Python and its libraries."
    return {
        "caption": caption,
        "rows": [(name, memory_text(size), round(100 * size / most, 1)) for name, size in rows.items()],
    }


def _checkpoints(run: PageRun) -> Table | None:
    if not run.facts.checkpoints:
        return None
    costs = {name: _cost_of_saves(run.curves, name) for name in ("write", "stall")}
    rows = [
        [
            f"{saved['step']:,}",
            ", ".join(saved["marks"]),
            stamp(saved["time"]),
            memory_text(saved["bytes"]),
            *(_seconds(costs[name].get(saved["step"])) for name in ("write", "stall")),
        ]
        for saved in run.facts.checkpoints
    ]
    ends, said = _ends(rows, _CHECKPOINTS)
    head = ["step", "marked", "written", "size", "writing", "training waited"]
    count = len(rows)
    return Table(
        f"{count:,} {'checkpoint' if count == 1 else 'checkpoints'}{said}", head, ends, frozenset((3, 4, 5))
    )


def _cost_of_saves(curves: RunCurves, name: str) -> dict[float, float]:
    """Return step of a checkpoint -> seconds of its write or stall."""
    seconds = dict(curves.column(f"checkpoint_{name}_seconds"))
    return {saved: seconds[step] for step, saved in curves.column("checkpoint_step") if step in seconds}


def _seconds(value: float | None) -> str:
    return "" if value is None or not isfinite(value) else f"{value:.3g} s"


def _export(facts: RunFacts) -> dict[str, str] | None:
    if not facts.export:
        return None
    names = [*facts.export]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return {"size": memory_text(sum(facts.export.values())), "files": ", ".join(names[:12]) + more}


def _environment(facts: RunFacts) -> dict[str, str]:
    """Return the environment of rank 0 at the last start; empty for a run that recorded none."""
    if not facts.starts:
        return {}
    start = facts.starts[-1]
    named = {"last start": stamp(start["time"]), "megalite": str(start.get("megalite", ""))}
    for table in ("machine", "packages"):
        entries = start.get(table)
        if isinstance(entries, Mapping):
            named |= {str(name): str(value) for name, value in entries.items()}
    for name in ("host", "device", "precision", "operators", "ranks", "ranks_a_host"):
        if name in start:
            named[name.replace("_", " ")] = str(start[name])
    return named


def _environment_table(views: Sequence[Mapping[str, Any]]) -> Table:
    known = [view for view in views if view["environment"]]
    names = list(dict.fromkeys(name for view in known for name in view["environment"]))
    rows = [[name, *(view["environment"].get(name, "") for view in known)] for name in names]
    return Table("Rank 0 at its last start", ["", *(view["name"] for view in known)], rows)


def _starts(facts: RunFacts) -> Table:
    rows = [
        [stamp(start["time"]), f"{start['step']:,}"]
        + [str(start.get(name, "")) for name in ("host", "ranks", "megalite")]
        for start in facts.starts
    ]
    ends, said = _ends(rows, _STARTS)
    head = ["started", "after step", "host", "ranks", "megalite"]
    return Table(f"{len(rows)} starts{said}", head, ends, frozenset((1, 3)))


def _thinning(runs: Sequence[PageRun], curves: Sequence[Mapping[str, Any]], left_out: Sequence[str]) -> str:
    """Return how the curves differ from the records; "" where every number is there."""
    texts = []
    longest = max((len(run.curves.steps) for run in runs), default=0)
    if any(len(run.curves.steps) > len(table["step"]) for run, table in zip(runs, curves, strict=True)):
        texts.append(
            f"The longest run has {longest:,} records; of equally long parts a curve has the lowest and the "
            "highest value."
        )
    if left_out:
        texts.append(
            f"The page has at most {MOST_CURVES} curves: {len(left_out):,} curves of layers are left out."
        )
    return " ".join(texts)
