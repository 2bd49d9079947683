"""The curves of a run: the numbers of its records by metric, and the points of them that a page shows."""

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from megalite.monitor.metrics import is_own_metric

LAYER_METRICS = {
    "grad_norm/": "gradient norm",
    "update_ratio/": "update ratio",
    "weight_norm/": "weight norm",
    "expert_load/": "fullest expert over the mean",
}
"""Prefix of the metrics that monitor.layers_every records -> their title."""
MOST_CURVES = 400
"""The curves of a page; those of layers beyond it are left out, and the page says so."""
_MODEL = "model"  # the name of the whole model among the layers
# The points of all curves of a page together, of layers and others; each takes about 15 bytes of it.
_LAYER_POINTS, _OTHER_POINTS = 30_000, 40_000
_LEAST_POINTS, _MOST_POINTS = 40, 1200


class Chart(NamedTuple):
    """A chart of one or several metrics. factor: from the metric's unit to the shown one. run: None for all runs."""

    title: str
    unit: str
    metrics: Sequence[str]
    factor: float = 1.0
    run: int | None = None

    @property
    def is_of_layers(self) -> bool:
        return self.run is not None


_CHARTS = (
    Chart("loss", "", ("loss", "validation_loss")),
    Chart("learning rate", "", ("learning_rate",)),
    Chart("gradient norm", "", ("grad_norm",)),
    Chart("tokens per second", "", ("tokens_per_second",)),
    Chart("MFU", "%", ("mfu",), 100.0),
    Chart("memory of the fullest rank", "GiB", ("memory_bytes", "reserved_bytes"), 2.0**-30),
    Chart("seconds of a step", "s", ("step_seconds", "data_seconds")),
    Chart("communication", "% of the step", ("communication_share", "communication_share_max"), 100.0),
    Chart("load of the cards", "%", ("card_utilisation",), 100.0),
    Chart("power of all cards", "W", ("cards_watts",)),
    Chart("temperature of the hottest card", "°C", ("card_celsius_max",)),
    Chart("loss scale", "", ("loss_scale",)),
    Chart("skipped steps", "", ("skipped_steps",)),
    Chart("mean loss of an epoch", "", ("epoch_loss",)),
    Chart("fullest expert over the mean", "", ("expert_load",)),
    Chart("idle experts", "", ("idle_experts",)),
    Chart("reward accuracy", "%", ("reward_accuracy", "validation_reward_accuracy"), 100.0),
    Chart("reward margin", "", ("reward_margin", "validation_reward_margin")),
)
_FAMILIES = {
    "learning rate": "learning_rate/",
    "loss": "validation_loss_",
    "communication": "communication_share/",
}
"""Title of a chart -> prefix of metrics that it has too, such as those of each group of parameters."""


class RunCurves:
    """The numbers of a run's records in the order of the file, a row a record; NaN for null."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.tokens, self.seconds = array("d"), array("d")
        self._columns: dict[str, tuple[array[int], array[float]]] = defaultdict(
            lambda: (array("q"), array("d"))
        )
        self._elapsed = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of metrics.jsonl. Its time is the sum of the seconds of the steps up to it."""
        row = len(self.steps)
        self._elapsed += record.get("step_seconds") or 0.0
        self.steps.append(record["step"])
        tokens = record.get("tokens")
        self.tokens.append(tokens if tokens is not None else self.tokens[-1] if row else 0)
        self.seconds.append(self._elapsed)
        for metric, value in record.items():
            if metric != "step" and not isinstance(value, str):
                rows, values = self._columns[metric]
                rows.append(row)
                values.append(math.nan if value is None else value)

    @property
    def metrics(self) -> list[str]:
        """The metrics that have a finite value, in the order in which they came."""
        return [name for name, (_, values) in self._columns.items() if any(map(math.isfinite, values))]

    def column(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) of each record that has the metric."""
        rows, values = self._columns.get(metric, ((), ()))
        return [(self.steps[row], value) for row, value in zip(rows, values, strict=True)]

    def points(self, metric: str, most: int) -> list[tuple[int, float | None]]:
        """Return row and value of at most about `most` points: of equally long parts the lowest and the highest.

        The first and the last point stay, and of a part with values that are not finite one of them, as None.
        """
        rows, values = self._columns[metric]
        count = len(rows)
        if count <= most:
            kept: Sequence[int] = range(count)
        else:
            parts = max(1, most // 3)
            chosen = {0, count - 1}
            for left, right in pairwise(count * part // parts for part in range(parts + 1)):
                chosen |= _extremes(values, left, right)
            kept = sorted(chosen)
        return [(rows[at], values[at] if math.isfinite(values[at]) else None) for at in kept]


def charts_of(runs: Sequence[RunCurves]) -> tuple[list[Chart], list[str]]:
    """Return the charts of a page, and the metrics that are left out of it."""
    known = list(dict.fromkeys(metric for run in runs for metric in run.metrics))
    charts = []
    for chart in _CHARTS:
        metrics = [metric for metric in chart.metrics if metric in known]
        if family := _FAMILIES.get(chart.title):
            metrics += [metric for metric in known if metric.startswith(family)]
        if metrics:
            charts.append(chart._replace(metrics=metrics))
    charts += [Chart(metric, "", (metric,)) for metric in known if not is_own_metric(metric)]
    left_out: list[str] = []
    count = sum(len(chart.metrics) * len(runs) for chart in charts)
    for number, run in enumerate(runs):
        for prefix, title in LAYER_METRICS.items():
            metrics = [
                name for name in run.metrics if name.startswith(prefix) and name != f"{prefix}{_MODEL}"
            ]
            fitting = metrics[: max(0, MOST_CURVES - count)]
            left_out += metrics[len(fitting) :]
            count += len(fitting)
            if fitting:
                charts.append(Chart(f"{title} of each layer", "", fitting, run=number))
    return charts, left_out


def curve_table(charts: Sequence[Chart], runs: Sequence[RunCurves]) -> list[dict[str, Any]]:
    """Return for each run its thinned curves: steps, tokens, seconds of the rows, and metric -> [rows, values]."""
    tables = []
    most = {layers: _most_points(charts, len(runs), layers=layers) for layers in (False, True)}
    for number, run in enumerate(runs):
        own = [chart for chart in charts if chart.run in (None, number)]
        wanted = {
            metric: (chart.factor, most[chart.is_of_layers])
            for chart in own
            for metric in set(chart.metrics).intersection(run.metrics)
        }
        tables.append(_of_run(run, wanted))
    return tables


def _most_points(charts: Sequence[Chart], runs: int, *, layers: bool) -> int:
    alike = [chart for chart in charts if chart.is_of_layers == layers]
    curves = sum(len(chart.metrics) * (1 if layers else runs) for chart in alike)
    points = _LAYER_POINTS if layers else _OTHER_POINTS
    return min(_MOST_POINTS, max(_LEAST_POINTS, points // max(1, curves)))


def _of_run(run: RunCurves, wanted: Mapping[str, tuple[float, int]]) -> dict[str, Any]:
    """Return the table of one run. wanted: metric -> its factor and the most points."""
    thinned = {metric: run.points(metric, most) for metric, (_, most) in wanted.items()}
    rows = sorted({row for points in thinned.values() for row, _ in points})
    places = {row: place for place, row in enumerate(rows)}
    recorded = set(run.metrics)
    return {
        "step": [run.steps[row] for row in rows],
        "tokens": [int(run.tokens[row]) for row in rows] if "tokens" in recorded else None,
        "seconds": [round(run.seconds[row], 2) for row in rows] if "step_seconds" in recorded else None,
        "curves": {
            metric: [
                [places[row] for row, _ in points],
                [_short(value, wanted[metric][0]) for _, value in points],
            ]
            for metric, points in thinned.items()
        },
    }


def _extremes(values: Sequence[float], left: int, right: int) -> set[int]:
    finite = [at for at in range(left, right) if math.isfinite(values[at])]
    other = next((at for at in range(left, right) if not math.isfinite(values[at])), None)
    places = {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)} if finite else set()
    return places if other is None else places | {other}


def _short(value: float | None, factor: float) -> float | None:
    shown = math.nan if value is None else value * factor
    return float(f"{shown:.6g}") if math.isfinite(shown) else None
