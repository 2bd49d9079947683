"""A program on a pseudo-terminal, and the screen that its output makes."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence

from tests.support.waiting import PATIENCE, ROOT, wait_until

_TOKEN = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


class Screen:
    """The lines that a text makes on a terminal of any height, as far as rich moves its cursor."""

    def __init__(self, text: str):
        self.lines, self.cursor_is_shown, self.is_alternate = [""], True, False
        self._row = self._column = 0
        self._main: tuple[list[str], int] = ([""], 0)
        for number, command, start, end, words in _TOKEN.findall(text):
            if words:
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + words + line[self._column + len(words) :]
                self._column += len(words)
            elif start or end:
                self._column = 0
                self._row += bool(end)
                self.lines += [""] * (self._row + 1 - len(self.lines))
            else:
                self._obey(number, command)

    def _obey(self, number: str, command: str) -> None:
        if command == "A":
            self._row = max(0, self._row - int(number or 1))
        elif command == "K":
            self.lines[self._row] = ""
        elif command == "H":
            self._row = self._column = 0
        elif number == "?25":
            self.cursor_is_shown = command == "h"
        elif number == "?1049" and command == "h":
            self._main, self.lines, self._row, self.is_alternate = (self.lines, self._row), [""], 0, True
        elif number == "?1049":
            (self.lines, self._row), self.is_alternate = self._main, False

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


class TerminalProgram:
    """Python with these arguments on a terminal of `columns`; its output is in `output`."""

    def __init__(self, arguments: Sequence[str], *, columns: int, **environ: str):
        self._terminal, program_end = pty.openpty()
        self.resize(columns)
        kept = {
            key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=program_end,
            stdout=program_end,
            stderr=program_end,
            start_new_session=True,
            env={**kept, "TERM": "xterm", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **environ},
        )
        os.close(program_end)
        os.set_blocking(self._terminal, False)
        self._bytes = b""

    def __enter__(self) -> "TerminalProgram":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)

    @property
    def output(self) -> str:
        try:
            while part := os.read(self._terminal, 65536):
                self._bytes += part
        except OSError:  # nothing more now, or ever
            pass
        return self._bytes.decode(errors="replace")

    def resize(self, columns: int, rows: int = 30) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, text: str) -> Screen:
        """Wait until the screen has a text."""
        wait_until(
            lambda: text in str(Screen(self.output)), f"{text} is not on the screen", process=self.process
        )
        return Screen(self.output)

    def ended(self, number: signal.Signals | None = None) -> tuple[int, Screen]:
        """Send a signal, if there is one, and return the exit code and the last screen."""
        if number is not None:
            self.process.send_signal(number)
        wait_until(
            lambda: self.output and self.process.poll() is not None, "the program did not end", PATIENCE
        )
        return self.process.returncode, Screen(self.output)
