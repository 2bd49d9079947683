"""`python -m tests.support.disturbed_run FAULT FILE train ...`: the command line, with a fault once FILE exists.

Faults: `hangs` and `full` stop the writing of a checkpoint; `slow` and `validates` make a checkpoint or a validation
take longer than the grace time of the tests, `exports` makes an export, which touches FILE itself, never end.
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megalite.checkpoint import unpublished
from megalite.checkpoint.tensor_file import write_tensor_file
from megalite.cli import main
from megalite.train import rank
from megalite.train.step.train_step import TrainStep

PAUSE_SECONDS, PAUSES = 0.5, 10
_evaluate = TrainStep.evaluate


def disturb(fault: str, now: Path) -> None:
    """Put the fault in the place of what works, in this process and its forks."""

    def write(path: Path, infos: Mapping[str, Any], read: Callable[[str], Any]) -> tuple[dict[str, str], int]:
        if now.exists() and fault == "hangs":
            time.sleep(600)
        if now.exists() and fault == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for pause in range(PAUSES if now.exists() and fault == "slow" else 0):
            time.sleep(PAUSE_SECONDS)
            path.write_bytes(bytes(pause))
        return write_tensor_file(path, infos, read)

    def evaluate(trainer: TrainStep, batch: Any) -> Any:
        if now.exists() and fault == "validates":
            time.sleep(PAUSE_SECONDS)
        return _evaluate(trainer, batch)

    def export(*_: Any) -> None:
        now.touch()
        time.sleep(600)

    if fault == "exports":
        rank.export = export  # type: ignore[attr-defined]
    unpublished.write_tensor_file = write  # type: ignore[attr-defined]
    TrainStep.evaluate = evaluate  # type: ignore[method-assign]


if __name__ == "__main__":
    disturb(sys.argv[1], Path(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
