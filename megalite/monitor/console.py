"""The console output of a run: a live view on a terminal, lines elsewhere. Only rank 0 prints."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TextIO

from megalite.launcher.process import unwritten_output_dropped
from megalite.monitor.jsonl import read_metrics
from megalite.monitor.metrics import SaveMetrics, StepMetrics, ValidationMetrics
from megalite.monitor.run_view import (
    LEAST_COLUMNS,
    RunHistory,
    RunStatus,
    figure_texts,
    seconds_left,
    step_fields,
    styled,
    view_lines,
)
from megalite.monitor.work import LINE_SECONDS, REDRAW_SECONDS, Work, duration, is_screen

if TYPE_CHECKING:
    from rich.live import Live

ConsoleMode = Literal["auto", "plain", "live"]


# Below these a slowdown of the steps during a write is within their scatter. metrics.jsonl has it in any case.
_SLOWDOWN, _SLOWED_STEPS = 1.2, 4


@dataclass(frozen=True)
class RunSummary:
    """The content of the last lines.

    recent_loss: the mean over the last `recent_steps` steps, since the loss of one step depends on its batch.
    validation, skipped: the lines about validation and skipped steps; "" without. places: name -> path, in the order
    shown.
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
    skipped: str = ""
    next_command: str = ""


class Console:
    """Shows the steps and messages of a run on one stream.

    mode: "live" and "auto" draw a live view on a terminal, "auto" if it is wide enough and colors are not refused.
    every: the number of steps between lines; the last step has one too. The live view is drawn every 0.25 s at most.
    peak: the text for the peak that `mfu` is a share of ("sgemm", "989 TFLOP/s").
    """

    def __init__(
        self,
        *,
        total_steps: int,
        every: int = 1,
        peak: str = "peak",
        mode: ConsoleMode = "auto",
        stream: TextIO | None = None,
    ):
        self._total_steps, self._every, self._peak = total_steps, every, peak
        self._stream = stream or sys.stdout
        self._live = _live(self._stream, mode) if mode != "plain" and is_screen(self._stream) else None
        self._history = RunHistory()
        self._notes: tuple[str, ...] = ()
        # The steps before this start; None once it has made one.
        self._done: int | None = None
        self._drawn = -REDRAW_SECONDS

    def __enter__(self) -> "Console":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def step(self, metrics: StepMetrics) -> None:
        """Show a step: in the live view, elsewhere if it is an `every`-th step or the last one."""
        due, last = metrics.step % self._every == 0, metrics.step == self._total_steps
        if self._live is not None:
            self._history.add(metrics.record())
            self._done = None
            if last or time.monotonic() - self._drawn >= REDRAW_SECONDS:
                self._draw()
        elif due or last:
            record, width = metrics.record(), len(str(self._total_steps))
            left = duration(seconds_left(record, self._total_steps) or 0.0)
            numbers = [*step_fields(record, self._peak), f"{left} left"]
            self.say(f"step {metrics.step:>{width}}/{self._total_steps}  " + "  ".join(numbers))

    def start(self, step: int, past: Path) -> None:
        """Show the live view before the first step of this start.

        step: the steps that are done. past: the metrics.jsonl with their records.
        """
        if self._live is not None:
            for record in read_metrics(past) if step else ():
                self._history.add(record)
            self._done = step
            self._draw(f"step {step + 1}")

    def working(self, title: str, unit: str = "", total: int | None = None) -> Work:
        """Return a phase between steps, shown in the live view, elsewhere by a line now and then."""
        if self._live is None:
            return Work(title, draw=self.say, seconds=LINE_SECONDS, unit=unit, total=total)
        return Work(title, draw=self._draw, seconds=REDRAW_SECONDS, unit=unit, total=total, erase=self._draw)

    def validation(self, metrics: ValidationMetrics) -> None:
        """Show a validation."""
        if self._live is not None:
            self._history.add({"step": metrics.step, **metrics.record()})
        sets = (
            "".join(f"  {name} {loss:.4f}" for name, loss in metrics.sets.items())
            if len(metrics.sets) > 1
            else ""
        )
        others, unit = f"perplexity {metrics.perplexity:,.2f}", "tokens"
        if metrics.figures:
            others, unit = "  ".join(figure_texts(metrics.figures)), "pairs"
        self.say(
            f"validation after step {metrics.step}: loss {metrics.loss:.4f}{sets}  {others}  "
            f"{round(metrics.tokens):,} {unit} in {duration(metrics.seconds)}"
        )

    def saved(self, metrics: SaveMetrics) -> None:
        """Show a checkpoint and what it cost."""
        self._notes = (f"checkpoint after step {metrics.step:,}",)
        text = f"saved {metrics.path.name}: training waited {metrics.stall_seconds:.2f} s"
        if metrics.staging_bytes:
            text += f", written in {metrics.write_seconds:.2f} s"
            slowdown = metrics.slowdown or 0.0
            if slowdown >= _SLOWDOWN and metrics.steps_during_write >= _SLOWED_STEPS:
                text += f"; the steps meanwhile took {slowdown:.1f} times as long as others"
        self.say(text)

    def say(self, text: str) -> None:
        """Print a line, above the live view if there is one."""
        with unwritten_output_dropped(of_full_disk=True):
            if self._live is None:
                print(text, file=self._stream, flush=True)
            else:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

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
        for line in filter(None, (summary.validation, summary.skipped)):
            self.say(line)
        width = max((len(name) for name in summary.places), default=0)
        for name, path in summary.places.items():
            self.say(f"  {name:<{width}}  {path}")
        if summary.next_command:
            self.say(f"next: {summary.next_command}")

    def close(self) -> None:
        """Stop updating the live view, which stays; `say` still works."""
        if self._live is not None and self._live.is_started:
            self._draw(ends=True)
            with unwritten_output_dropped(of_full_disk=True):
                self._live.stop()

    def _draw(self, phase: str = "", *, ends: bool = False) -> None:
        """Draw the live view. phase: what the run does instead of steps. ends: nothing is drawn after it."""
        from rich.console import Group

        assert self._live is not None
        status = RunStatus(
            detail=phase,
            total_steps=self._total_steps,
            step=self._done,
            peak=self._peak,
            notes=self._notes,
        )
        console = self._live.console
        lines = view_lines(self._history, status, console.width - 1, ascii_only=console.options.ascii_only)
        # The empty line at the end has the cursor: the errors of other processes begin there.
        view = Group(styled(lines[1:])) if ends else Group(styled(lines), "")
        with unwritten_output_dropped(of_full_disk=True):
            self._live.start()
            console.show_cursor(True)  # otherwise a killed run leaves the terminal without a cursor
            self._live.update(view, refresh=True)
        self._drawn = time.monotonic()


def announce(text: str) -> None:
    """Print a line without a Console: before the run starts, or after it ended."""
    with unwritten_output_dropped(of_full_disk=False):
        print(text, flush=True)


def complain(text: str) -> None:
    """Print an error to stderr."""
    with unwritten_output_dropped(of_full_disk=False):
        print(text, file=sys.stderr, flush=True)


def _live(stream: TextIO, mode: ConsoleMode) -> "Live | None":
    """Return rich's live display without its refresh thread, which would take time from the training threads."""
    from rich.console import Console as RichConsole
    from rich.live import Live

    console = RichConsole(file=stream)
    narrow = console.width < LEAST_COLUMNS or console.no_color
    # rich has rules of its own for a terminal, such as TTY_COMPATIBLE=0, and draws nothing elsewhere.
    if not console.is_terminal or console.is_dumb_terminal or (mode == "auto" and narrow):
        return None
    # Errors that go to a file stay out of the terminal.
    return Live(console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
