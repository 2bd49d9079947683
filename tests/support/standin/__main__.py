"""`python -m tests.support.standin train run.toml ...`: the command line with the stand-in as the accelerator.

With RECORD in the environment, each process writes the called functions of megalite to a file of that name plus the
process id, one per line.
"""

import atexit
import os
import sys
import threading
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).parents[3] / "megalite") + os.sep
called: set[str] = set()


def note(frame: FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(PACKAGE):
        called.add(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}")


def write_calls(path: str) -> None:
    sys.setprofile(None)
    Path(f"{path}.{os.getpid()}").write_text("\n".join(sorted(called)))


if __name__ == "__main__":
    from tests.support.standin import use_standin

    use_standin()
    if record := os.environ.get("RECORD"):
        atexit.register(write_calls, record)
        # A forked rank runs only the exit functions of multiprocessing.
        util.register_after_fork(
            note, lambda _: util.Finalize(None, write_calls, args=(record,), exitpriority=1)
        )
        threading.setprofile(note)
        sys.setprofile(note)
    from megalite.cli import main

    sys.exit(main())
