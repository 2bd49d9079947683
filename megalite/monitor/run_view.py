"""The live view of a run, for `train` and `megalite top`: what its records have shown, and the lines that are drawn."""

import math
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from megalite.monitor.metrics import FIGURES, is_own_metric
from megalite.monitor.work import duration

if TYPE_CHECKING:
    from rich.text import Text

LEAST_COLUMNS = 60
"""The columns that a terminal needs for the live view of `train`."""
# The points of a loss curve in memory, and those below which its first drop is drawn in full.
_MOST_POINTS, _FEW_POINTS = 512, 10
_USUAL_STEPS = 20
_LONGEST_CURVE = 120


class LossCurve:
    """The loss over a whole run in bounded memory: the means of equally many successive steps."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._stride = 1
        self._open: list[float] = []

    def add(self, loss: float) -> None:
        """Add the finite loss of the next step."""
        self._open.append(loss)
        if len(self._open) == self._stride:
            self._means.append(fmean(self._open))
            self._open = []
        if len(self._means) == _MOST_POINTS:
            self._means = [fmean(self._means[at : at + 2]) for at in range(0, _MOST_POINTS, 2)]
            self._stride *= 2

    def drawn(self, width: int, marks: str) -> str:
        """Return the curve in at most `width` characters. marks: those of the heights, the lowest first."""
        points = self._means + ([fmean(self._open)] if self._open else [])
        cells = min(width, len(points))
        if cells < 2:
            return ""
        edges = [at * len(points) // cells for at in range(cells + 1)]
        heights = [fmean(points[left:right]) for left, right in pairwise(edges)]
        # The drop of the first steps would flatten all others: the highest tenth shares a mark.
        low, high = min(heights), sorted(heights)[int((cells - 1) * (1.0 if cells < _FEW_POINTS else 0.9))]
        scale = (len(marks) - 1) / (high - low) if high > low else 0.0
        return "".join(marks[min(len(marks) - 1, round((height - low) * scale))] for height in heights)


class RunHistory:
    """Takes the records of metrics.jsonl one by one, in the order of the file; has the last numbers and the alarms."""

    def __init__(self) -> None:
        self.curve = LossCurve()
        self.last: Mapping[str, Any] = {}
        """The record of the last step; empty before it."""
        self.validation: Mapping[str, Any] = {}
        self.best_validation: Mapping[str, Any] = {}
        self.step: int | None = None
        self.total_steps: int | None = None
        """As the last start of the run has it; None before its first step."""
        self._seconds: deque[float] = deque(maxlen=_USUAL_STEPS)
        self._not_finite: list[int] = []
        self._rollbacks = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record: a step, a validation or both. null stands for a number that was not finite."""
        step = self.step = int(record["step"])
        if "validation_loss" in record:
            self.validation = record
            best = self.best_validation.get("validation_loss")
            if _is_finite(record["validation_loss"]) and (best is None or record["validation_loss"] < best):
                self.best_validation = record
        if "loss" not in record:
            return
        self.last = record
        self.total_steps = record.get("total_steps", self.total_steps)
        self._rollbacks += "rolled_back_to" in record
        if _is_finite(record["loss"]):
            self.curve.add(record["loss"])
        # ZeRO computes no norm where a spike of the loss leaves the update out.
        measured = ("loss",) if record.get("skipped_for") == "loss_spike" else ("loss", "grad_norm")
        if not all(_is_finite(record.get(key, 0.0)) for key in measured):
            self._not_finite = [*self._not_finite[:1], step]
        if _is_finite(record.get("step_seconds")):
            self._seconds.append(record["step_seconds"])

    @property
    def usual_seconds(self) -> float | None:
        """The median time of the last steps; None before the first."""
        return median(self._seconds) if self._seconds else None

    @property
    def alarms(self) -> list[str]:
        """Texts on numbers that were not finite, skipped steps and a slow rank."""
        texts = []
        if self._not_finite:
            first, last = self._not_finite[0], self._not_finite[-1]
            steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
            texts.append(f"loss or gradient was not finite in {steps}")
        if skipped := self.last.get("skipped_steps"):
            texts.append(skipped_text(skipped, self._rollbacks))
        if alarm := self.last.get("alarm"):
            texts.append(alarm)
        return texts


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, beside its records.

    state: "preparing", "running", "saving", "ended", ...; detail: the phase, or the cause of a failure.
    total_steps: None where nothing says it. step: the steps that are done, where no record of this start says it.
    peak: the text for the peak that mfu is a share of. notes: on the last checkpoint, and the like.
    """

    state: str = "running"
    name: str = ""
    detail: str = ""
    total_steps: int | None = None
    step: int | None = None
    peak: str = ""
    notes: Sequence[str] = ()
    alarms: Sequence[str] = ()


class ViewLine(NamedTuple):
    """A line of the view, with rich's style of it."""

    text: str
    style: str = ""


def view_lines(
    history: RunHistory, status: RunStatus, width: int, *, ascii_only: bool = False
) -> list[ViewLine]:
    """Return the lines of the view, none longer than `width`. ascii_only: for a terminal without UTF-8."""
    record, step = history.last, status.step if status.step is not None else history.step or 0
    style = "bold red" if status.state == "failed" else "bold"
    lines = [ViewLine(text, style) for text in _flow([status.name, status.state, status.detail], width)]
    lines.append(ViewLine(_bar_line(record, step, status.total_steps, width, ascii_only), "green"))
    if record:
        loss, *fields = step_fields(record, status.peak)
        curve = history.curve.drawn(
            min(_LONGEST_CURVE, width - len(loss) - 2), ".:-=+*#@" if ascii_only else "▁▂▃▄▅▆▇█"
        )
        lines.append(ViewLine(f"{loss}  {curve}" if curve else loss, "cyan"))
        seconds = history.usual_seconds
        fields += [] if seconds is None else [f"{seconds:.3g} s a step"]
        lines += map(ViewLine, _flow(fields, width))
    lines += map(ViewLine, _flow([*_validations(history), *status.notes], width))
    alarms = [f"! {text}" for text in (*history.alarms, *status.alarms)]
    lines += [ViewLine(text, "bold red") for text in _flow(alarms, width)]
    return [ViewLine(printable(line.text, ascii_only=ascii_only), line.style) for line in lines]


def printable(text: str, *, ascii_only: bool) -> str:
    """Return the text of a folder, an error or a callback as one line that any terminal of this kind can show."""
    line = "".join(mark if mark.isprintable() else " " for mark in text)
    return line.encode("ascii", "replace").decode() if ascii_only else line


def styled(lines: Sequence[ViewLine]) -> "Text":
    """Return lines as rich's text; a longer one is cut at the terminal's edge."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")  # not every terminal has the character of an ellipsis
    for number, line in enumerate(lines):
        text.append("\n" * bool(number)).append(line.text, line.style)
    return text


def skipped_text(steps: int, rollbacks: int) -> str:
    """Return the number of steps without an update, and of rollbacks that are among their causes."""
    text = f"{steps:,} {'step was' if steps == 1 else 'steps were'} skipped"
    return text + (
        f", with {rollbacks:,} {'rollback' if rollbacks == 1 else 'rollbacks'}" if rollbacks else ""
    )


def skipped_line(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return `skipped_text` of the records of all steps; empty if none was skipped."""
    skipped = steps[-1].get("skipped_steps") if steps else None
    return skipped_text(skipped, sum("rolled_back_to" in record for record in steps)) if skipped else ""


def step_fields(record: Mapping[str, Any], peak: str = "") -> list[str]:
    """Return the numbers of a step as texts, the loss first. record: as in metrics.jsonl."""
    share = record.get("mfu")
    memory = f"{_number(record.get('memory_bytes')) / 2**30:.2f} GiB"
    if record.get("reserved_bytes") is not None:
        memory += f" of {record['reserved_bytes'] / 2**30:.2f} reserved"
    scale, skipped, waits = map(record.get, ("loss_scale", "skipped_steps", "communication_share"))
    custom = {key: value for key, value in record.items() if not is_own_metric(key) and _is_number(value)}
    return [
        f"loss {_number(record.get('loss')):.4f}",
        *figure_texts({key: record[key] for key in FIGURES if key in record}),
        f"grad norm {_number(record.get('grad_norm')):.3f}",
        f"lr {_number(record.get('learning_rate')):.3g}",
        *([] if scale is None else [f"loss scale {scale:,.10g}"]),
        *([] if skipped is None else [f"{skipped} skipped"]),
        f"{_number(record.get('tokens_per_second')):,.0f} tokens/s",
        *([] if share is None else [f"{share:.0%} of {peak}" if peak else f"MFU {share:.0%}"]),
        *([] if waits is None else [f"communication {waits:.0%}"]),
        memory,
        *(f"{name} {value:.4g}" for name, value in custom.items()),
    ]


def figure_texts(figures: Mapping[str, float | None]) -> list[str]:
    """Return the figures of preferences as texts."""
    return [f"{name.replace('_', ' ')} {_number(value):.4g}" for name, value in figures.items()]


def seconds_left(record: Mapping[str, Any], total_steps: int | None) -> float | None:
    """Return the time until the last step at the present speed; None where it is not known."""
    if total_steps is None or not record.get("tokens_per_second") or not record.get("step"):
        return None
    tokens_per_step = record.get("tokens", 0) / record["step"]
    return max(0.0, (total_steps - record["step"]) * tokens_per_step / record["tokens_per_second"])


def _bar_line(record: Mapping[str, Any], step: int, total: int | None, width: int, ascii_only: bool) -> str:
    if not total:
        return f"step {step:,}"
    left = seconds_left(record, total)
    texts = [
        f"{step:,}/{total:,}",
        f"{step / total:.0%}",
        *([] if left is None else [f"{duration(left)} left"]),
    ]
    text = "  ".join(texts)
    cells = max(4, min(60, width - len(text) - 2))
    done = min(cells, cells * step // total)
    full, empty = "#." if ascii_only else "━╌"
    return f"{full * done}{empty * (cells - done)}  {text}"


def _validations(history: RunHistory) -> list[str]:
    if not history.validation:
        return []
    last, best = history.validation, history.best_validation
    texts = [f"validation {_number(last['validation_loss']):.4f} after step {last['step']:,}"]
    if best and best is not last:
        texts.append(f"lowest {best['validation_loss']:.4f} after step {best['step']:,}")
    return texts


def _flow(fields: Sequence[str], width: int) -> list[str]:
    """Return lines of fields with two blanks between them; empty ones are left out, and long ones are wrapped."""
    lines: list[str] = []
    for text in fields:
        if lines and text and len(lines[-1]) + 2 + len(text) <= width:
            lines[-1] += f"  {text}"
        else:
            lines += textwrap.wrap(text, max(width, 1))
    return lines


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)
