"""The lines of the live view, which show all there is at every width, and the loss curve in bounded memory."""

import io
import math
from typing import Any

import pytest
from rich.console import Console as RichConsole
from rich.console import Group

from megalite.monitor.run_view import LossCurve, RunHistory, RunStatus, ViewLine, styled, view_lines
from tests.support.step_records import step_record as record


def history(*records: dict[str, Any]) -> RunHistory:
    seen = RunHistory()
    for line in records:
        seen.add(line)
    return seen


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_width_shows_all_there_is(width: int, ascii_only: bool) -> None:
    seen = history(
        *(record(step) for step in range(1, 20)),
        record(20, validation_loss=2.5, weight_norm=3.25, skipped_steps=2, reserved_bytes=2**31),
        record(21, validation_loss=2.75, weight_norm=3.5, skipped_steps=2, reserved_bytes=2**31),
    )
    error = "rank 3 on node-with-a-long-name: RuntimeError: " + "x" * 60 + "\x1b[2J\nsecond line"
    status = RunStatus("failed", "runs/first", error, 200, notes=("checkpoint after step 20",))
    lines = view_lines(seen, status, width, ascii_only=ascii_only)
    text = " ".join(line.text for line in lines)
    assert max(len(line.text) for line in lines) <= width
    assert text.isprintable() and (text.isascii() or not ascii_only)
    words = "runs/first failed second line 21/200 10% 1:30 left loss 2.1429 grad norm 0.500 lr 0.001 2,000 tokens/s"
    for shown in (*words.split(), "MFU 64%", "1.50 GiB of 2.00 reserved", "0.5 s a step", "weight_norm 3.5"):
        assert shown in text
    assert "validation 2.7500 after step 21" in text and "lowest 2.5000 after step 20" in text
    assert "checkpoint after step 20" in text and "! 2 steps were skipped" in text


def test_a_run_without_a_record_or_a_known_end_has_a_view() -> None:
    assert [line.text for line in view_lines(history(), RunStatus("preparing", "a"), 80)] == [
        "a  preparing",
        "step 0",
    ]
    lines = [line.text for line in view_lines(history(record(1234)), RunStatus(), 80)]
    assert lines[1] == "step 1,234" and not any("left" in line for line in lines)


def test_numbers_that_are_not_finite_are_an_alarm() -> None:
    fine, gone = record(3), record(5, grad_norm=None)
    assert history(fine).alarms == []
    assert history(fine, record(4, loss=math.nan)).alarms == ["loss or gradient was not finite in step 4"]
    seen = history(fine, record(4, loss=None), gone, record(6))
    assert seen.alarms == ["loss or gradient was not finite in steps 4 to 5"]
    assert any("grad norm nan" in line.text for line in view_lines(history(gone), RunStatus(), 80))


def test_a_curve_of_any_length_has_the_width_that_is_asked_for() -> None:
    curve = LossCurve()
    assert curve.drawn(8, "0123") == ""
    for step in range(100_000):
        curve.add(100_000.0 - step)
    drawn = curve.drawn(40, "0123456789")
    assert len(drawn) == 40 and list(drawn) == sorted(drawn, reverse=True)
    assert set(drawn) == set("0123456789")


def test_the_drop_of_the_first_steps_does_not_flatten_the_curve() -> None:
    curve = LossCurve()
    for loss in (100.0, *(4.0 - step / 20 for step in range(39))):
        curve.add(loss)
    assert set(curve.drawn(40, "0123")) == set("0123")
    level = LossCurve()
    for _ in range(4):
        level.add(1.0)
    assert level.drawn(8, "0123") == "0000"


def test_a_terminal_that_became_narrower_cuts_lines_without_another_character() -> None:
    stream, lines = io.StringIO(), [ViewLine("loss 2.0000  grad norm 0.5"), ViewLine("running")]
    RichConsole(file=stream, width=10).print(Group(styled(lines)))  # print alone joins texts, and wraps
    assert stream.getvalue() == "loss 2.000\nrunning\n"
