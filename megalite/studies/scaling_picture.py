"""The picture of a scaling law: loss against parameters, tokens and operations, and the residuals of the fit."""

from collections.abc import Callable, Sequence

import numpy as np

from megalite.studies.chart import ChartAxis, ChartPanel, ChartSeries, chart_svg, short_number
from megalite.studies.scaling_fit import ScalingFit, ScalingPoint

_POINTS = 40
_PARAMETERS, _TOKENS, _FLOPS = "N, parameters without embedding and head", "D, tokens", "6 N D, FLOPs"


def scaling_svg(title: str, lines: Sequence[str], fit: ScalingFit, held_out: ScalingPoint) -> str:
    """Draw the fitted runs, their law, and the held-out run, whose loss is nan before it is trained."""
    law, points = fit.law, fit.points
    stars = (held_out,) if held_out.loss == held_out.loss else ()
    every = [*points, held_out]
    sizes = sorted({point.parameters for point in every})

    def panel(
        name: str, axis: str, place: Callable[[ScalingPoint], float], group: Callable[[ScalingPoint], float]
    ) -> ChartPanel:
        groups = sorted({group(point) for point in every})
        series = []
        span = np.geomspace(min(map(place, every)), max(map(place, every)), _POINTS)
        for colour, value in enumerate(groups):
            label = f"{'D' if axis == _PARAMETERS else 'N'} = {short_number(value)}"
            members = [point for point in points if group(point) == value]
            dots = [(place(point), point.loss) for point in members]
            series.append(ChartSeries(dots, "dots", label, colour, _titles(members)))
            curve = [(float(at), _law_loss(law.loss, axis, float(at), value)) for at in span]
            series.append(ChartSeries(curve, "line" if members else "dashed", "", colour))
        colour = groups.index(group(held_out))
        series.append(ChartSeries([(place(p), p.loss) for p in stars], "star", "", colour, _titles(stars)))
        losses = [point.loss for point in (*points, *stars)]
        return ChartPanel(
            name, ChartAxis(axis, True), ChartAxis("validation loss"), series, (min(losses), max(losses))
        )

    panels = [
        panel(
            "loss by parameters, a curve for each D", _PARAMETERS, lambda p: p.parameters, lambda p: p.tokens
        ),
        panel("loss by tokens, a curve for each N", _TOKENS, lambda p: p.tokens, lambda p: p.parameters),
        panel("loss by operations, a curve for each N", _FLOPS, _flops, lambda p: p.parameters),
        _residuals(fit, stars, sizes),
    ]
    return chart_svg(title, lines, panels, 2, height=330)


def _law_loss(loss: Callable[[float, float], float], axis: str, at: float, value: float) -> float:
    if axis == _PARAMETERS:
        return loss(at, value)
    return loss(value, at if axis == _TOKENS else at / 6 / value)


def _residuals(fit: ScalingFit, stars: Sequence[ScalingPoint], sizes: Sequence[float]) -> ChartPanel:
    percent = [100 * residual for residual in fit.residuals]
    series = []
    for colour, size in enumerate(sizes):
        own = [
            (point, error)
            for point, error in zip(fit.points, percent, strict=True)
            if point.parameters == size
        ]
        dots = [(_flops(point), error) for point, error in own]
        series.append(ChartSeries(dots, "dots", "", colour, _titles([point for point, _ in own])))
        stars_here = [p for p in stars if p.parameters == size]
        off = [(_flops(p), 100 * (p.loss / fit.law.loss(p.parameters, p.tokens) - 1)) for p in stars_here]
        series.append(ChartSeries(off, "star", "", colour, _titles(stars_here)))
    return ChartPanel(
        "measured above the law (star: held out)", ChartAxis(_FLOPS, True), ChartAxis("%"), series
    )


def _titles(points: Sequence[ScalingPoint]) -> list[str]:
    return [
        f"N = {point.parameters:,.0f}, D = {point.tokens:,.0f}: loss {point.loss:.4f}" for point in points
    ]


def _flops(point: ScalingPoint) -> float:
    return 6 * point.parameters * point.tokens
