"""A long phase: a line that is redrawn and erased on a terminal, lines elsewhere, nothing in other processes."""

import fcntl
import io
import os
import pty
import struct
import termios
import threading

import pytest

from megalite.monitor import work as module
from megalite.monitor.work import Work, working


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDRAW_SECONDS", "LINE_SECONDS"):
        monkeypatch.setattr(module, name, 0.001)


class Lines(io.StringIO):
    """A stream that tells when a line is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        self.written.set()


def test_lines_elsewhere_tell_how_far_the_work_is() -> None:
    stream = Lines()
    with working("evaluating", unit="windows", total=12_000, stream=stream) as work:
        work.advance(3_000)
        stream.written.clear()
        assert stream.written.wait(60)
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue() and "evaluating: 3,000 of 12,000 windows, 0:00 left" in lines


def test_a_terminal_has_one_line_that_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb", buffering=0) as screen:
        with working("loading runs/a/checkpoints/step-000010", stream=stream):
            shown = screen.read(256)
            while shown.count(b"\r") < 2:
                shown += screen.read(256)
        while not shown.endswith(b"\r\x1b[2K"):
            shown += screen.read(256)
    assert b"\n" not in shown
    assert {len(line.removeprefix(b"\x1b[2K")) for line in shown.split(b"\r")} == {0, 29}, "a line wraps"


def test_short_work_and_other_processes_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 3600.0)
    stream = io.StringIO()
    with working("exporting", stream=stream), working("exporting", shown=False, stream=stream) as other:
        other.advance()
    assert stream.getvalue() == ""
    assert not [each for each in threading.enumerate() if each.name.startswith("work: ")]


def test_work_without_a_number_tells_its_time_and_ends_with_an_error() -> None:
    stream = Lines()
    with pytest.raises(OSError), working("exporting", stream=stream):
        assert stream.written.wait(60)
        raise OSError
    assert stream.getvalue().splitlines()[0] == "exporting: 0 s so far"
    assert Work("reading", draw=print, seconds=0, unit="files").text().startswith("reading: 0 files, ")
