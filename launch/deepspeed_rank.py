"""One rank of `deepspeed --launcher mpich` and `--launcher slurm`, which run a file instead of a module."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from megalite.launcher.process import die_with_parent

STOPPED_TO_RESUME = (75, 76)


def main() -> int:
    parent = os.getppid()
    die_with_parent(parent)
    rank = subprocess.Popen([sys.executable, "-m", "megalite", *sys.argv[1:]])

    def pass_on(number: int, _: FrameType | None) -> None:
        rank.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    code = rank.wait()
    # DeepSpeed's helper returns 0 for a rank that failed; mpirun notices a helper that was killed.
    helper = b"launcher_helper" in Path(f"/proc/{parent}/cmdline").read_bytes()
    if helper and code not in (0, *STOPPED_TO_RESUME):
        os.kill(parent, signal.SIGKILL)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
