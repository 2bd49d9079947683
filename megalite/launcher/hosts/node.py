"""Starts the ranks of one host: `megalite launch --backend ssh` runs this module there, and keeps its stdin open.

python -m megalite.launcher.hosts.node --first-rank 2 --ranks 2 --world-size 4 --master n0:29500 -- train RUN.toml
"""

import argparse
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from megalite.launcher.process import adopt_orphans, kill_descendants
from megalite.launcher.rank.environment import variables

_POLL_SECONDS = 0.1
# The ranks get this long to end by themselves, with a word, once the launching process is gone or a rank has failed.
_GRACE_SECONDS = 3.0


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait; return 0, or the exit code of the first rank that failed.

    Ends all ranks soon after stdin is closed, which tells that the launching process or its connection is gone.
    """
    parser = argparse.ArgumentParser()
    for name in ("--first-rank", "--ranks", "--world-size"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    address, _, port = options.master.rpartition(":")
    adopt_orphans(True)
    running = []
    try:
        for local_rank in range(options.ranks):
            own = {
                "RANK": options.first_rank + local_rank,
                "WORLD_SIZE": options.world_size,
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": options.ranks,
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
            }
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "megalite", *options.command],
                    env=variables() | {name: str(value) for name, value in own.items()},
                    stdin=subprocess.DEVNULL,
                )
            )
        return _wait(running)
    finally:
        kill_descendants()


def _wait(running: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait until all ranks have ended, or shortly after one has failed or stdin is closed; return the exit code."""
    code, deadline, watched = 0, None, [sys.stdin.fileno()]
    # A list: every process has to be asked.
    while None in [process.poll() for process in running]:
        failed = [process.returncode for process in running if process.returncode]
        if failed and not code:
            code = failed[0] if failed[0] > 0 else 128 - failed[0]
        lost = False
        if select.select(watched, [], [], _POLL_SECONDS)[0]:
            with suppress(OSError):
                lost = not os.read(watched[0], 4096)
        if lost:
            watched, code = [], code or 1
        if deadline is None and code:
            deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return code
    ended = [process.returncode for process in running if process.returncode]
    return code or next((each if each > 0 else 128 - each for each in ended), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
