"""Processes that keep a machine busy, to show that a test waits for events and not for times.

python -m tests.support.load 8               eight busy processes, until Ctrl-C
python -m tests.support.load 8 COMMAND ...   eight, as long as COMMAND runs; exits with its code
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Until its parent has ended, also by `kill -9`.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@contextmanager
def load(processes: int) -> Iterator[list[int]]:
    """Keep `processes` processes busy inside of the block, which gets their ids."""
    busy = [subprocess.Popen([sys.executable, "-ISc", BUSY]) for _ in range(processes)]
    try:
        yield [process.pid for process in busy]
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


def main(count: str, *command: str) -> int:
    with load(int(count)):
        try:
            return subprocess.call(command or ["sleep", "infinity"])
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
