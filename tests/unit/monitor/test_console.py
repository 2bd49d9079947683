"""Single lines where there is no terminal, a live view where there is one, and a summary in both."""

import errno
import fcntl
import io
import os
import pty
import re
import select
import struct
import termios
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.monitor.console import Console, ConsoleMode, RunSummary
from megalite.monitor.jsonl import MetricsFile
from megalite.monitor.metrics import SaveMetrics, StepMetrics, ValidationMetrics, curves, is_own_metric
from megalite.monitor.preparation import PreparationConsole, PreparationProgress
from megalite.monitor.work import duration
from megalite.parallel.objective import Preference
from tests.support.terminal import Screen
from tests.support.waiting import wait_until


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def metrics(step: int, mfu: float | None = 0.64) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=3.0 / step,
        grad_norm=0.5,
        learning_rate=1e-3,
        tokens=1000 * step,
        tokens_per_second=2000.0,
        mfu=mfu,
        memory_bytes=3 * 2**29,
        step_seconds=0.5,
        data_seconds=0.001,
    )


SUMMARY = RunSummary(
    steps=10,
    tokens=10_000,
    seconds=5.0,
    first_loss=3.0,
    last_loss=0.3,
    recent_loss=0.4,
    recent_steps=10,
    places={"checkpoint": Path("runs/a/checkpoints/step-000010"), "export": Path("runs/a/export")},
)


def test_one_line_every_few_steps_and_for_the_last() -> None:
    stream = io.StringIO()
    with Console(total_steps=10, every=4, peak="sgemm", stream=stream) as console:
        for step in range(1, 11):
            console.step(metrics(step))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["4/10", "8/10", "10/10"]
    assert lines[0] == (
        "step  4/10  loss 0.7500  grad norm 0.500  lr 0.001  2,000 tokens/s  64% of sgemm  1.50 GiB  0:03 left"
    )
    assert lines[-1].endswith("0:00 left")


def test_a_checkpoint_has_a_line_with_what_it_cost() -> None:
    stream = io.StringIO()
    console = Console(total_steps=10, stream=stream)
    waited = SaveMetrics(10, Path("checkpoints/step-000010"), stall_seconds=1.25, write_seconds=1.25)
    console.saved(waited)
    beside = replace(waited, stall_seconds=0.014, staging_bytes=200 << 20, steps_during_write=4)
    console.saved(beside)
    console.saved(replace(beside, slowdown=1.31))
    # Within the scatter of steps.
    console.saved(replace(beside, slowdown=1.13))
    console.saved(replace(beside, slowdown=11.15, steps_during_write=1))
    assert stream.getvalue().splitlines() == [
        "saved step-000010: training waited 1.25 s",
        "saved step-000010: training waited 0.01 s, written in 1.25 s",
        "saved step-000010: training waited 0.01 s, written in 1.25 s; the steps meanwhile took 1.3 times as long as"
        " others",
        "saved step-000010: training waited 0.01 s, written in 1.25 s",
        "saved step-000010: training waited 0.01 s, written in 1.25 s",
    ]
    assert waited.record() == {
        "checkpoint_step": 10,
        "checkpoint_stall_seconds": 1.25,
        "checkpoint_write_seconds": 1.25,
        "checkpoint_staging_bytes": 0,
        "checkpoint_slowdown": None,
    }
    assert all(is_own_metric(key) for key in waited.record())


def test_a_validation_has_a_line_of_its_own_with_each_set_where_there_are_several() -> None:
    stream = io.StringIO()
    console = Console(total_steps=10, stream=stream)
    console.validation(ValidationMetrics(4, 2.0, 12_345.0, 61.0, {"books": 2.0}))
    console.validation(ValidationMetrics(8, 800.0, 12_345.0, 1.0, {"books": 1.0, "code": 1599.0}))
    assert stream.getvalue().splitlines() == [
        "validation after step 4: loss 2.0000  perplexity 7.39  12,345 tokens in 1:01",
        "validation after step 8: loss 800.0000  books 1.0000  code 1599.0000  perplexity inf  12,345 tokens in 0:01",
    ]


def test_fp16_shows_its_loss_scale_and_what_was_skipped() -> None:
    stream = io.StringIO()
    scaled = replace(metrics(1), loss_scale=2.0**16, skipped_steps=3)
    Console(total_steps=1, stream=stream).step(scaled)
    assert "grad norm 0.500  lr 0.001  loss scale 65,536  3 skipped  2,000 tokens/s" in stream.getvalue()
    assert scaled.record().items() >= {"loss_scale": 65536.0, "skipped_steps": 3, "mfu": 0.64}.items()


def test_a_record_has_only_what_its_precision_has() -> None:
    record = metrics(1, mfu=None).record()
    assert record["mfu"] is None and not {"loss_scale", "skipped_steps"} & record.keys()


def test_a_device_shows_what_its_allocator_reserved() -> None:
    stream = io.StringIO()
    on_device = replace(metrics(1), reserved_bytes=2 * 2**30)
    Console(total_steps=1, stream=stream).step(on_device)
    assert "  1.50 GiB of 2.00 reserved" in stream.getvalue()
    assert on_device.record()["reserved_bytes"] == 2**31 and "reserved_bytes" not in metrics(1).record()


def test_an_unknown_peak_is_left_out() -> None:
    stream = io.StringIO()
    Console(total_steps=1, stream=stream).step(metrics(1, mfu=None))
    assert "%" not in stream.getvalue()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 100 columns on which each step is drawn."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("megalite.monitor.console.REDRAW_SECONDS", 0.0)
    return Terminal()


def drawn(stream: io.StringIO) -> str:
    """Return what a stream has, without control sequences, and forget it."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    stream.seek(0)
    stream.truncate()
    return text


def test_a_terminal_has_a_live_view_and_messages_stand_above_it(stream: Terminal) -> None:
    console = Console(total_steps=2, peak="sgemm", stream=stream)
    console.say("tokenizer: trained [4096]")
    console.step(metrics(1))
    console.warn("slow disk")
    # The error of another process would begin at the cursor.
    assert Screen(stream.getvalue() + "error").lines[-2:] == [
        "grad norm 0.500  lr 0.001  2,000 tokens/s  64% of sgemm  1.50 GiB  0.5 s a step",
        "error",
    ]
    console.step(metrics(2))
    console.saved(SaveMetrics(2, Path("checkpoints/step-000002"), stall_seconds=1.25, write_seconds=1.25))
    console.summary(SUMMARY)
    screen = Screen(stream.getvalue())
    lines = [line.rstrip() for line in screen.lines]
    assert lines[:3] == [
        "tokenizer: trained [4096]",
        "warning: slow disk",
        "saved step-000002: training waited 1.25 s",
    ]
    assert lines[3].endswith("━  2/2  100%  0:00 left")
    assert lines[4:8] == [
        "loss 1.5000  █▁",
        "grad norm 0.500  lr 0.001  2,000 tokens/s  64% of sgemm  1.50 GiB  0.5 s a step",
        "checkpoint after step 2",
        "done: 10 steps, 10,000 tokens in 0:05 (2,000 tokens/s)",
    ]
    assert screen.cursor_is_shown


def test_the_live_view_moves_with_every_step_whatever_the_steps_between_lines(
    stream: Terminal, tmp_path: Path
) -> None:
    console = Console(total_steps=200, every=50, stream=stream)
    console.start(0, tmp_path / "metrics.jsonl")
    assert "0/200" in (first := drawn(stream)) and "step 1" in first
    for step in (1, 2, 3):
        console.step(metrics(step))
        assert f"{step}/200" in (text := drawn(stream)) and f"loss {3 / step:.4f}" in text
    console.close()


def test_a_resumed_run_shows_what_was_before(stream: Terminal, tmp_path: Path) -> None:
    past = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        past.append(metrics(step).record())
    console = Console(total_steps=200, stream=stream)
    console.start(3, tmp_path / "metrics.jsonl")
    assert "3/200" in (text := drawn(stream)) and "step 4" in text and "loss 1.0000  █▃▁" in text
    console.close()


def test_steps_share_a_drawing_but_for_the_last(stream: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.monitor.console.REDRAW_SECONDS", 1e9)
    console = Console(total_steps=9, stream=stream)
    shown = []
    for step in range(1, 10):
        console.step(metrics(step))
        shown.append(f"{step}/9" in drawn(stream))
    console.close()
    assert [step for step, is_shown in enumerate(shown, start=1) if is_shown] == [1, 9]


def test_a_phase_between_steps_stands_in_the_live_view_and_gives_way_to_the_steps(
    stream: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.monitor.console.REDRAW_SECONDS", 0.001)
    console = Console(total_steps=10, stream=stream)
    console.step(metrics(4))
    with console.working("validating", "batches", 3) as work:
        work.advance()
        wait_until(lambda: "validating: 1 of 3 batches" in stream.getvalue(), "nothing was shown")
    assert "validating" not in str(Screen(stream.getvalue()))
    console.close()


@pytest.mark.parametrize(
    ("mode", "columns", "no_color", "live"),
    [
        ("auto", "59", "", False),
        ("auto", "60", "", True),
        ("auto", "140", "1", False),
        ("live", "40", "1", True),
        ("plain", "140", "", False),
    ],
)
def test_the_live_view_needs_a_wide_terminal_unless_it_is_asked_for(
    stream: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    mode: ConsoleMode,
    columns: str,
    no_color: str,
    live: bool,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", no_color)
    console = Console(total_steps=2, mode=mode, stream=stream)
    console.step(metrics(1))
    console.close()
    assert ("\x1b" in stream.getvalue()) == live
    assert "loss 3.0000" in str(screen := Screen(stream.getvalue()))
    assert not live or max(map(len, screen.lines)) < int(columns)


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("TTY_COMPATIBLE", "0"), ("FORCE_COLOR", "")])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    stream: Terminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    Console(total_steps=2, stream=stream).step(metrics(1))
    assert stream.getvalue().startswith("step 1/2  loss 3.0000")


@pytest.mark.parametrize(("rows", "columns", "bar"), [(0, 0, False), (30, 100, True)])
def test_a_launcher_that_logs_through_a_terminal_gets_lines(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, bar: bool
) -> None:
    """Open MPI's ranks write to pseudo-terminals, without a size where its own output is a file."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns or 80))
    monkeypatch.delenv("NO_COLOR", raising=False)
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb", buffering=0) as log:

        def logged() -> bytes:
            text = b""
            while select.select([log], [], [], 0)[0]:
                text += log.read(4096)
            return text

        Console(total_steps=2, stream=stream).step(metrics(1))
        stepped = logged()
        preparation = PreparationConsole(stream)
        preparation.begin("tokenizing")
        preparation.progress(PreparationProgress(1, 2, 1, 10))
        preparation.end("tokenized")
        prepared = logged()
    assert (b"\x1b" in stepped, b"\x1b" in prepared) == (bar, bar)
    assert b"loss 3.0000" in stepped


class Refusing(io.StringIO):
    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


def test_a_log_that_cannot_grow_ends_no_run() -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        console = Console(total_steps=2, stream=Refusing(number))
        console.step(metrics(1))
        console.warn("the disk is full")
    with pytest.raises(OSError, match="Bad file descriptor"):
        Console(total_steps=2, stream=Refusing(errno.EBADF)).step(metrics(1))


def test_the_summary_says_what_was_learned_and_where_things_lie() -> None:
    stream = io.StringIO()
    Console(total_steps=10, stream=stream).summary(SUMMARY)
    assert stream.getvalue().splitlines() == [
        "done: 10 steps, 10,000 tokens in 0:05 (2,000 tokens/s)",
        "loss: 3.0000 first, 0.3000 last, 0.4000 mean of the last 10 steps",
        "  checkpoint  runs/a/checkpoints/step-000010",
        "  export      runs/a/export",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (125, "2:05"), (3723, "1:02:03")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_preferences_show_and_record_their_rewards() -> None:
    stream, figures = io.StringIO(), dict(zip(Preference().figures, (0.75, 1.25), strict=True))
    console = Console(total_steps=10, stream=stream)
    step = replace(metrics(4, mfu=None), figures=figures)
    validation = ValidationMetrics(4, 0.5, 20.0, 61.0, {"pairs": 0.5}, figures)
    console.step(step)
    console.validation(validation)
    assert stream.getvalue().splitlines() == [
        "step  4/10  loss 0.7500  reward accuracy 0.75  reward margin 1.25  grad norm 0.500  lr 0.001  2,000 tokens/s"
        "  1.50 GiB"
        "  0:03 left",
        "validation after step 4: loss 0.5000  reward accuracy 0.75  reward margin 1.25  20 pairs in 1:01",
    ]
    assert {**step.record(), **figures} == step.record() and "figures" not in step.record()
    drawn = curves({**step.record(), **validation.record()})
    assert drawn["train/reward_margin"] == drawn["validation/reward_margin"] == 1.25
    assert validation.record() == {
        "validation_loss": 0.5,
        "validation_reward_accuracy": 0.75,
        "validation_reward_margin": 1.25,
        "validation_pairs": 20,
        "validation_seconds": 61.0,
    }
    assert "validation/perplexity" not in curves(validation.record())
    assert all(map(is_own_metric, figures)) and not is_own_metric("reward_length")
