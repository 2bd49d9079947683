"""`python -m tests.support.standin train run.toml ...`: the command line with the stand-in as the accelerator.

With RECORD in the environment, each process writes the called functions of megalite to a file of that name plus the
process id, one per line. With DEVICE_BYTES every device has that little memory; with FULL_AFTER=STEP:RANK nothing more
fits on the device of that rank after that step.
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


def fill_after(step: int, rank: int) -> None:
    """Let no allocation fit on the device of `rank` from the end of `step` on."""
    from megalite.train.step.train_step import TrainStep
    from tests.support.standin import use_standin

    train_step = TrainStep.train_step

    def train_step_and_fill(self: TrainStep, *arguments: Any) -> Any:
        report = train_step(self, *arguments)
        if report.step == step and self.mesh.rank == rank:
            device = use_standin()
            device.set_memory_limit(device.memory_stats(self.mesh.device.index)["allocated"] + 1)
        return report

    TrainStep.train_step = train_step_and_fill  # type: ignore[method-assign]


def write_calls(path: str) -> None:
    sys.setprofile(None)
    Path(f"{path}.{os.getpid()}").write_text("\n".join(sorted(called)))


if __name__ == "__main__":
    from tests.support.standin import use_standin

    compiled = use_standin()
    if little := os.environ.get("DEVICE_BYTES"):
        compiled.set_memory_limit(int(little))
    if full := os.environ.get("FULL_AFTER"):
        fill_after(*map(int, full.split(":")))
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
