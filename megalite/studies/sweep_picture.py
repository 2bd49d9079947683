"""The picture of a sweep: loss by value for each swept setting, then the loss curve of each run."""

from collections.abc import Sequence
from statistics import fmean

from megalite.studies.chart import ChartAxis, ChartPanel, ChartSeries, chart_svg
from megalite.studies.outcomes import RunOutcome, loss_curve
from megalite.studies.study_runs import StudyRun

_COLUMNS, _MOST_CURVES, _MOST_POINTS = 3, 24, 80
_LOG_RATIO = 5.0


def sweep_svg(
    title: str, measure: str, keys: Sequence[str], outcomes: Sequence[RunOutcome], runs: Sequence[StudyRun]
) -> str:
    """Draw the outcomes, which are sorted by loss. keys: the swept settings."""
    finished = [outcome for outcome in outcomes if outcome.loss is not None]
    folders = {run.name: run.folder for run in runs}
    curves = {
        outcome.name: _thinned(loss_curve(folders[outcome.name])) for outcome in outcomes[:_MOST_CURVES]
    }
    # A run that diverged would flatten all others: nothing is drawn above the losses at the start.
    starts = [curve[0][1] for curve in curves.values() if curve]
    lowest = [min(y for _, y in curve) for curve in curves.values() if curve]
    span = (min(lowest), max(starts)) if starts and min(lowest) < max(starts) else None
    highest = max([*starts, *(outcome.loss or 0.0 for outcome in finished[:1])], default=0.0)
    panels = [_by_value(key, finished, highest) for key in keys]
    for outcome in outcomes[:_MOST_CURVES]:
        name = outcome.name if outcome.loss is None else f"{outcome.name}: {outcome.loss:.4f}"
        curve = ChartSeries(curves[outcome.name], "line")
        shown = (curve,) if curve.points else ()
        panels.append(ChartPanel(name, ChartAxis("step"), ChartAxis("training loss"), shown, span))
    lines = [
        f"above: {measure}; below: training loss by step, the best run first; a dot at the upper edge is higher"
    ]
    if len(outcomes) > _MOST_CURVES:
        lines[0] += f" ({len(outcomes) - _MOST_CURVES} more are not drawn)"
    return chart_svg(title, lines, panels, min(_COLUMNS, max(len(panels), 1)))


def _by_value(key: str, finished: Sequence[RunOutcome], highest: float) -> ChartPanel:
    texts = [outcome.values[key] for outcome in finished]
    losses = [outcome.loss or 0.0 for outcome in finished]
    titles = [f"{outcome.name}: {outcome.loss:.4f}" for outcome in finished]
    try:
        places, names = [float(text) for text in texts], []
    except ValueError:
        names = list(dict.fromkeys(sorted(texts)))
        places = [float(names.index(text)) for text in texts]
    log = not names and bool(places) and min(places) > 0 and max(places) / min(places) >= _LOG_RATIO
    dots = ChartSeries(list(zip(places, losses, strict=True)), "dots", titles=titles)
    lowest = {place: min(loss for at, loss in dots.points if at == place) for place in places}
    line = ChartSeries(sorted(lowest.items()), "line", colour=7)
    series = (line, dots) if len(lowest) > 1 and not names else (dots,)
    span = (min(losses), min(max(losses), highest)) if losses else None
    return ChartPanel(key, ChartAxis(key, log, names), ChartAxis("loss"), series if places else (), span)


def _thinned(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the means of equally many successive points."""
    stride = -(-len(curve) // _MOST_POINTS) or 1
    parts = [curve[at : at + stride] for at in range(0, len(curve), stride)]
    return [(part[-1][0], fmean(y for _, y in part)) for part in parts]
