"""megalite scaling: fit a scaling law to a ladder of small models, and test it on a larger one.

L(N, D) = E + A / N^alpha + B / D^beta, after Hoffmann et al. 2022. Repeat the command to go on.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.cli.arguments import Parser, add_value, number_above_zero, options_and_settings, whole_number
from megalite.cli.results import report
from megalite.cli.sweep import refuse_launcher, study_folder_of, train_runs
from megalite.config.flags import COMMAND_LINE
from megalite.errors import ConfigError, Problem, counted, named
from megalite.launcher.process import available_cores
from megalite.studies.chart import short_number
from megalite.studies.ladder import (
    HELD_OUT,
    LADDER,
    RATE_TIMES_WIDTH,
    LadderRun,
    Rung,
    default_tokens,
    ladder_run,
    run_name,
    run_settings,
    rung,
    seconds_left,
    token_count,
)
from megalite.studies.outcomes import VALIDATION, StudyRecord, outcomes_csv
from megalite.studies.run_pool import RunPool
from megalite.studies.scaling_fit import ScalingFit, ScalingPoint, fit_scaling_law
from megalite.studies.scaling_picture import scaling_svg
from megalite.studies.study_runs import (
    StudyRun,
    StudySource,
    StudyText,
    checked_runs,
    share_text,
    with_text,
)

# Flags in front of the user's own where a ladder is made from a text alone.
_FROM_TEXT = (
    "--training.sequence_length=128",
    "--training.micro_batch_size=8",
    "--training.micro_batches=1",
    "--tokenizer.vocab_size=512",
    "--validation.samples=1024",
)
_COMMON = "run_file --sizes --budgets --held-out --jobs --plan --help"
_LEAST_FLOOR = 0.01
_KEYS = ("model.hidden_size", "model.num_hidden_layers", "training.steps", "optimizer.learning_rate")


@dataclass(frozen=True)
class _Ladder:
    """The runs, the last of which is held out of the fit."""

    folder: Path
    runs: list[StudyRun]
    sizes: list[LadderRun]
    record: StudyRecord
    train_tokens: int

    @property
    def held_out(self) -> LadderRun:
        return self.sizes[-1]

    def points(self) -> list[ScalingPoint]:
        """Return the finished runs that the law is fitted to."""
        return [point for size in self.sizes[:-1] if not math.isnan((point := self.point(size)).loss)]

    def point(self, size: LadderRun) -> ScalingPoint:
        """Return a run with its loss; nan before it has one."""
        loss = self.record.outcomes[size.name].loss
        return ScalingPoint(size.parameters, size.tokens, math.nan if loss is None else loss)


def run(arguments: Sequence[str]) -> int:
    """Run `megalite scaling [RUN.toml] [--data.source TEXT]`. Returns the exit code: 1 where a run failed."""
    own, flags = options_and_settings(arguments)
    options = command_parser().parse_args(own)
    refuse_launcher("scaling")
    ladder = _ladder(options, flags)
    for line in _plan_lines(ladder, options.jobs):
        print(line)
    report(folder=ladder.folder)
    if options.plan:
        report(runs=[asdict(size) for size in ladder.sizes])
        return 0
    pool = RunPool(options.run_file, jobs=options.jobs, say=lambda text: print(text, flush=True))
    if stopped := train_runs(pool, ladder.runs[:-1], ladder.record):
        print("stopped: the same command goes on")
        return stopped
    fit = fit_scaling_law(ladder.points(), ladder.runs[0].config.run.seed)
    flops = options.flops or 6.0 * ladder.held_out.parameters * ladder.held_out.tokens
    for line in [*_run_lines(ladder, fit), *_law_lines(fit, flops), _prediction(ladder, fit)]:
        print(line)
    # The prediction is written down before the run that tests it.
    _write(ladder, fit, flops)
    if stopped := train_runs(pool, ladder.runs[-1:], ladder.record):
        print("stopped: the same command goes on")
        return stopped
    report(**_write(ladder, fit, flops))
    print(_verdict(ladder, fit))
    for name in ("scaling.json", "scaling.csv", "scaling.svg"):
        print(f"  {ladder.folder / name}")
    return 1 if any(outcome.state == "failed" for outcome in ladder.record.outcomes.values()) else 0


def _ladder(options: argparse.Namespace, flags: Sequence[str]) -> _Ladder:
    source = StudySource(options.run_file, tuple(flags))
    if options.run_file is None:
        from megalite.cli.first_run import starter_of

        source = StudySource(None, (*_FROM_TEXT, *flags), starter_of(flags))
    folder = study_folder_of(source, (), "scaling")
    base = source.config()
    if base.model.weights is not None:
        problem = Problem(
            "model.weights", "the models of a ladder are trained from the start", "leave it out"
        )
        raise ConfigError([problem], source.name)
    if not (base.data.validation or base.data.split):
        problem = Problem(
            "data.split", "is needed: the law is one of the validation loss", "set [0.95, 0.05]"
        )
        raise ConfigError([problem], source.name)
    text = share_text(base, folder / "text", ())
    if text.vocab_size is None or text.train_tokens is None:
        problem = Problem("data.source", "has no token files that all runs can share", "name one text")
        raise ConfigError([problem], source.name)
    tokens, most = default_tokens(text.train_tokens)
    tokens, held_tokens = options.budgets or tokens, options.held_out_tokens or most
    sizes = [(size, count) for size in options.sizes or LADDER for count in tokens]
    sizes.append((options.held_out, held_tokens))
    if len(set(sizes)) < len(sizes):
        problem = Problem("--sizes", "the ladder has a run twice, or the held-out one", "name each once")
        raise ConfigError([problem], COMMAND_LINE)
    named = {
        run_name(size, count): run_settings(size, count, base, options.rate_times_width)
        for size, count in sizes
    }
    runs = checked_runs(source, folder, named, jobs=options.jobs)
    # The held-out run is trained alone, on all cores.
    runs[-1:] = checked_runs(source, folder, dict([named.popitem()]), jobs=1)
    runs = with_text(runs, text)
    record = StudyRecord(folder / "runs.json", runs, VALIDATION)
    return _Ladder(folder, runs, _sizes(runs, [size for size, _ in sizes], text), record, text.train_tokens)


def _sizes(runs: Sequence[StudyRun], rungs: Sequence[Rung], text: StudyText) -> list[LadderRun]:
    assert text.vocab_size is not None
    return [ladder_run(run, size, text.vocab_size) for run, size in zip(runs, rungs, strict=True)]


def _plan_lines(ladder: _Ladder, jobs: int) -> Iterator[str]:
    yield f"{'size':>8} {'N':>10} {'with tables':>12} {'D':>10} {'FLOPs':>9} {'rate':>9}"
    for run, size in zip(ladder.runs, ladder.sizes, strict=True):
        rate = run.values["optimizer.learning_rate"]
        held = "  held out of the fit" * (size is ladder.held_out)
        yield (
            f"{size.rung!s:>8} {size.parameters:>10,} {size.all_parameters:>12,} {size.tokens:>10,} "
            f"{size.flops:>9.2e} {rate:>9}{held}"
        )
    yield "N: parameters without embedding and head; D: tokens; FLOPs: with the head, forward and backward"
    largest = max(size.tokens for size in ladder.sizes)
    passes = largest / ladder.train_tokens
    repeats = "no token is seen twice" if passes <= 1 else f"the longest run sees them {passes:.1f} times"
    yield f"the text has {ladder.train_tokens:,} training tokens: {repeats}"
    left, known = seconds_left(ladder.sizes, ladder.record.outcomes)
    at_once = min(jobs, available_cores())
    source = (
        "by the runs that are finished"
        if known
        else "by the speed of a server's core, until a run is finished"
    )
    yield (
        f"{counted(len(ladder.runs), 'run')}, about {left / 60:.1f} min of processor time left, "
        f"{left / 60 / at_once:.1f} min with {counted(at_once, 'job')} at once ({source})"
    )


def _run_lines(ladder: _Ladder, fit: ScalingFit) -> Iterator[str]:
    yield f"{'size':>8} {'N':>10} {'D':>10} {'loss':>8} {'law':>8} {'off by':>8}"
    residuals = dict(zip(fit.points, fit.residuals, strict=True))
    for size in ladder.sizes[:-1]:
        point = ladder.point(size)
        if math.isnan(point.loss):
            outcome = ladder.record.outcomes[size.name]
            yield f"{size.rung!s:>8} {size.parameters:>10,} {size.tokens:>10,} {outcome.state} {outcome.cause}"
            continue
        law = fit.law.loss(point.parameters, point.tokens)
        off = f"{math.expm1(residuals[point]):+.2%}"
        yield f"{size.rung!s:>8} {size.parameters:>10,} {size.tokens:>10,} {point.loss:8.4f} {law:8.4f} {off:>8}"


def _law_lines(fit: ScalingFit, flops: float) -> Iterator[str]:
    law = fit.law
    yield f"L = {law.irreducible:.3f} + {law.a:.3g} / N^{law.alpha:.3f} + {law.b:.3g} / D^{law.beta:.3f}"
    yield f"95 % intervals of {len(fit.resampled)} resamples of {counted(len(fit.points), 'run')}:"
    for name, (low, high) in _intervals(fit).items():
        yield f"  {name:<12} {low:.3g} to {high:.3g}"
    if at_limit := fit.exponents_at_limit:
        yield (
            f"  warning: {' and '.join(at_limit)} at the limit of the fit: the loss does not fall as a power there, "
            "or the learning rates do not suit every size"
        )
    spread = math.sqrt(sum(residual**2 for residual in fit.residuals) / len(fit.residuals))
    yield f"  root mean square residual {spread:.2%}, largest {max(map(abs, fit.residuals)):.2%}"
    parameters, tokens = law.optimum(flops)
    optima = [resampled.optimum(flops) for resampled in fit.resampled]
    n_low, n_high = fit.interval([n for n, _ in optima])
    d_low, d_high = fit.interval([d for _, d in optima])
    yield (
        f"lowest loss for 6 N D = {flops:.2e} FLOPs: N = {short_number(parameters)} "
        f"({short_number(n_low)} to {short_number(n_high)}), D = {short_number(tokens)} "
        f"({short_number(d_low)} to {short_number(d_high)}), loss {law.loss(parameters, tokens):.4f}"
    )

    if law.irreducible < _LEAST_FLOOR * min(point.loss for point in fit.points):
        yield "  note: E is near 0, which these runs do not tell from a small one: the ladder is too short for it"
    spans = {parameters: [p.parameters for p in fit.points], tokens: [p.tokens for p in fit.points]}
    if any(not min(values) <= value <= max(values) for value, values in spans.items()):
        yield "  note: this optimum lies outside of the ladder, where nothing was measured"


def _intervals(fit: ScalingFit) -> dict[str, tuple[float, float]]:
    names = {"E": "irreducible", "A": "a", "B": "b", "alpha": "alpha", "beta": "beta"}
    return {
        name: fit.interval([getattr(law, field) for law in fit.resampled]) for name, field in names.items()
    }


def _prediction(ladder: _Ladder, fit: ScalingFit) -> str:
    held = ladder.held_out
    low, high = fit.predicted_interval(held.parameters, held.tokens)
    return (
        f"prediction for {held.rung}, N = {held.parameters:,}, D = {held.tokens:,}: "
        f"{fit.law.loss(held.parameters, held.tokens):.4f} ({low:.4f} to {high:.4f})"
    )


def _verdict(ladder: _Ladder, fit: ScalingFit) -> str:
    held, loss = ladder.held_out, ladder.point(ladder.held_out).loss
    if math.isnan(loss):
        outcome = ladder.record.outcomes[held.name]
        return f"the held-out run has no loss: {outcome.state} {outcome.cause}"
    law = fit.law.loss(held.parameters, held.tokens)
    low, high = fit.predicted_interval(held.parameters, held.tokens)
    place = "inside" if low <= loss <= high else "outside"
    return (
        f"predicted {law:.4f}, measured {loss:.4f}: {loss / law - 1:+.2%}, {place} of {low:.4f} to {high:.4f}"
    )


def _write(ladder: _Ladder, fit: ScalingFit, flops: float) -> dict[str, Any]:
    held, point = ladder.held_out, ladder.point(ladder.held_out)
    predicted = fit.law.loss(held.parameters, held.tokens)
    measured = None if math.isnan(point.loss) else point.loss
    parameters, tokens = fit.law.optimum(flops)
    outcomes = ladder.record.outcomes
    content = {
        "law": asdict(fit.law),
        "intervals_95": _intervals(fit),
        "optimum": {"flops": flops, "parameters": parameters, "tokens": tokens},
        "held_out": {
            "predicted": predicted,
            "interval_95": fit.predicted_interval(held.parameters, held.tokens),
            "measured": measured,
            "error": None if measured is None else measured / predicted - 1,
        },
        "runs": [
            {
                **asdict(size),
                "loss": outcomes[size.name].loss,
                "processor_seconds": outcomes[size.name].processor_seconds,
            }
            for size in ladder.sizes
        ],
        "processor_seconds": sum(outcome.processor_seconds for outcome in outcomes.values()),
    }
    ordered = [outcomes[size.name] for size in ladder.sizes]
    formula = next(_law_lines(fit, flops))
    tested = _prediction(ladder, fit) if measured is None else f"held out: {_verdict(ladder, fit)}"
    picture = scaling_svg(f"Scaling law of {counted(len(fit.points), 'run')}", [formula, tested], fit, point)
    with named(ladder.folder):
        (ladder.folder / "scaling.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (ladder.folder / "scaling.csv").write_text(outcomes_csv(ordered, _KEYS), encoding="utf-8")
        (ladder.folder / "scaling.svg").write_text(picture, encoding="utf-8")
    return content


def command_parser() -> Parser:
    about = "--SECTION.KEY VALUE sets any other setting; the runs are in run.folder with -scaling behind it"
    parser = Parser(prog="megalite scaling", description=__doc__, common=_COMMON.split(), epilog=about)
    about = "the base of every run: text, tokenizer, batch; without it --data.source TEXT"
    parser.add_argument("run_file", type=Path, nargs="?", metavar="RUN.toml", help=about)
    about = f"sizes of the fitted models ({' '.join(map(str, LADDER))})"
    parser.add_argument("--sizes", type=rung, nargs="+", metavar="WIDTHxLAYERS", help=about)
    about = (
        "tokens of each size's runs, as in 100k 400k 1.6M (1/16, 1/8, 1/4, 1/2 of 2,097,152 or of the text)"
    )
    parser.add_argument("--budgets", type=token_count, nargs="+", metavar="N", help=about)
    add_value(parser, "--held-out", rung, "WIDTHxLAYERS", "the larger model that tests the law", HELD_OUT)
    about = "its tokens (2,097,152, or all of a shorter text)"
    add_value(parser, "--held-out-tokens", token_count, "N", about)
    about = "learning rate x width"
    add_value(parser, "--rate-times-width", number_above_zero(), "X", about, RATE_TIMES_WIDTH)
    add_value(parser, "--flops", number_above_zero(), "X", "find the best N and D for this budget")
    add_value(parser, "--jobs", whole_number(1), "N", "runs at once; they share the cores", available_cores())
    parser.add_argument("--plan", action="store_true", help="show the ladder and its time, and train nothing")
    return parser
