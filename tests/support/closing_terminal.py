"""Runs a command on a terminal of its own, and closes the terminal under it.

`python -m tests.support.closing_terminal METRICS STEPS COMMAND...` closes it when the file has so many lines, and ends
with the code of the command, which ends with it.
"""

import os
import pty
import select
import sys
from contextlib import suppress
from pathlib import Path

from megalite.launcher.process import die_with_parent


def main(metrics: Path, steps: int, command: list[str]) -> int:
    own = os.getpid()
    child, terminal = pty.fork()
    if child == 0:
        die_with_parent(own)
        os.execvp(command[0], command)
    shown = b""
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= steps):
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the command has ended
                break
    os.close(terminal)  # the kernel sends SIGHUP
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(BrokenPipeError):
        print(shown.decode(errors="replace"))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]) % 256)
