"""The console output of a run: a progress bar on a terminal, lines elsewhere. Only rank 0 prints."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from megalite.monitor.metrics import SaveMetrics, StepMetrics, ValidationMetrics
from megalite.monitor.work import LINE_SECONDS, REDRAW_SECONDS, Work, duration, is_screen

if TYPE_CHECKING:
    from rich.live import Live

# Drawing the bar takes 0.7 ms: short steps share one drawing.
_SECONDS_OF_A_DRAWING = 0.02


@dataclass(frozen=True)
class RunSummary:
    """The content of the last lines.

    recent_loss: the mean over the last `recent_steps` steps, since the loss of one step depends on its batch.
    validation: the line about validation; "" without validation. places: name -> path, in the order shown.
    next_command: the command to go on with; "" without one.
    """

    steps: int
    tokens: int
    seconds: float
    first_loss: float
    last_loss: float
    recent_loss: float
    recent_steps: int
    places: Mapping[str, Path | str]
    validation: str = ""
    next_command: str = ""


class Console:
    """Shows the steps and messages of a run on one stream.

    every: the number of steps between lines; the last step has one too. A bar moves with every step instead.
    peak: the text for the peak that `mfu` is a share of ("sgemm", "989 TFLOP/s").
    """

    def __init__(self, *, total_steps: int, every: int = 1, peak: str = "peak", stream: TextIO | None = None):
        self._total_steps, self._every, self._peak = total_steps, every, peak
        self._stream = stream or sys.stdout
        self._bar = _live(self._stream) if is_screen(self._stream) else None
        self._last: StepMetrics | None = None
        self._seconds_not_drawn = 0.0

    def __enter__(self) -> "Console":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def step(self, metrics: StepMetrics) -> None:
        """Show a step: in the bar, elsewhere if it is an `every`-th step or the last one."""
        self._last = metrics
        due = metrics.step % self._every == 0 or metrics.step == self._total_steps
        if self._bar is not None:
            self._seconds_not_drawn += metrics.step_seconds
            if due or self._seconds_not_drawn >= _SECONDS_OF_A_DRAWING:
                self._draw()
        elif due:
            width = len(str(self._total_steps))
            numbers = [*self._numbers(metrics), self._time_left(metrics)]
            self.say(f"step {metrics.step:>{width}}/{self._total_steps}  " + "  ".join(numbers))

    def start(self, step: int) -> None:
        """Show the bar before the first step of this start. step: the steps that are done."""
        if self._bar is not None:
            self._draw(f"step {step + 1}", step)

    def working(self, title: str, unit: str = "", total: int | None = None) -> Work:
        """Return a phase between steps, shown below the bar, elsewhere by a line now and then."""
        if self._bar is None:
            return Work(title, draw=self.say, seconds=LINE_SECONDS, unit=unit, total=total)
        return Work(title, draw=self._draw, seconds=REDRAW_SECONDS, unit=unit, total=total, erase=self._draw)

    def validation(self, metrics: ValidationMetrics) -> None:
        """Show a validation."""
        sets = (
            "".join(f"  {name} {loss:.4f}" for name, loss in metrics.sets.items())
            if len(metrics.sets) > 1
            else ""
        )
        others, unit = f"perplexity {metrics.perplexity:,.2f}", "tokens"
        if metrics.figures:
            others, unit = "  ".join(_shown(metrics.figures)), "pairs"
        self.say(
            f"validation after step {metrics.step}: loss {metrics.loss:.4f}{sets}  {others}  "
            f"{round(metrics.tokens):,} {unit} in {duration(metrics.seconds)}"
        )

    def saved(self, metrics: SaveMetrics) -> None:
        """Show a checkpoint and what it cost."""
        text = f"saved {metrics.path.name}: training waited {metrics.stall_seconds:.2f} s"
        if metrics.staging_bytes:
            text += f", written in {metrics.write_seconds:.2f} s"
            if metrics.slowdown is not None:
                text += f" (steps {metrics.slowdown:.2f}x as long)"
        self.say(text)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.say(f"warning: {text}")

    def summary(self, summary: RunSummary) -> None:
        """Print the last lines of a run: steps and speed, losses, output paths, the next command."""
        self.close()
        rate = summary.tokens / summary.seconds if summary.seconds else 0.0
        self.say(
            f"done: {summary.steps:,} steps, {summary.tokens:,} tokens in {duration(summary.seconds)} "
            f"({rate:,.0f} tokens/s)"
        )
        loss = f"loss: {summary.first_loss:.4f} first, {summary.last_loss:.4f} last"
        if summary.recent_steps > 1:
            loss += f", {summary.recent_loss:.4f} mean of the last {summary.recent_steps} steps"
        self.say(loss)
        if summary.validation:
            self.say(summary.validation)
        width = max((len(name) for name in summary.places), default=0)
        for name, path in summary.places.items():
            self.say(f"  {name:<{width}}  {path}")
        if summary.next_command:
            self.say(f"next: {summary.next_command}")

    def close(self) -> None:
        """Stop updating the bar; `say` still works."""
        if self._bar is not None:
            self._bar.stop()

    def _draw(self, phase: str = "", step: int = 0) -> None:
        """Draw the bar with the numbers below it; side by side they do not fit into 80 columns.

        phase: in place of the numbers. step: the steps that are done, as long as this start has made none.
        """
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        assert self._bar is not None
        metrics, self._seconds_not_drawn = self._last, 0.0
        if metrics is not None:
            step, phase = metrics.step, phase or "  ".join(self._numbers(metrics))
        row = Table.grid(padding=(0, 2))
        left = "" if metrics is None else self._time_left(metrics)
        row.add_row(
            ProgressBar(total=self._total_steps, completed=step, width=40),
            f"{step}/{self._total_steps}",
            left,
        )
        self._bar.start()
        self._bar.console.show_cursor(True)  # otherwise a killed run leaves the terminal without a cursor
        self._bar.update(Group(row, Text(phase, no_wrap=True, overflow="ellipsis")), refresh=True)

    def _numbers(self, metrics: StepMetrics) -> list[str]:
        shares = [] if metrics.mfu is None else [f"{metrics.mfu:.0%} of {self._peak}"]
        scale = [] if metrics.loss_scale is None else [f"loss scale {metrics.loss_scale:,.10g}"]
        if metrics.skipped_steps is not None:
            scale.append(f"{metrics.skipped_steps} skipped")
        memory = f"{metrics.memory_bytes / 2**30:.2f} GiB"
        if metrics.reserved_bytes is not None:
            memory += f" of {metrics.reserved_bytes / 2**30:.2f} reserved"
        return [
            f"loss {metrics.loss:.4f}",
            *_shown(metrics.figures),
            f"grad norm {metrics.grad_norm:.3f}",
            f"lr {metrics.learning_rate:.3g}",
            *scale,
            f"{metrics.tokens_per_second:,.0f} tokens/s",
            *shares,
            memory,
            *(f"{name} {value:.4g}" for name, value in metrics.custom.items()),
        ]

    def _time_left(self, metrics: StepMetrics) -> str:
        tokens_per_step = metrics.tokens / metrics.step
        steps_left = self._total_steps - metrics.step
        return f"{duration(steps_left * tokens_per_step / metrics.tokens_per_second)} left"


def _shown(figures: Mapping[str, float]) -> list[str]:
    return [f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items()]


def announce(text: str) -> None:
    """Print a line without a Console: before the run starts, or after it ended."""
    print(text, flush=True)


def complain(text: str) -> None:
    """Print an error to stderr."""
    print(text, file=sys.stderr, flush=True)


def _live(stream: TextIO) -> "Live | None":
    """Return rich's live display without its refresh thread, which would take time from the training threads."""
    from rich.console import Console as RichConsole
    from rich.live import Live

    console = RichConsole(file=stream)
    return None if console.is_dumb_terminal else Live(console=console, auto_refresh=False)
