"""Ways to hang for rank 3 of a job that is started by commands: its interpreters plant one as they start.

A `sitecustomize.py` with `SITE` on PYTHONPATH calls `plant` with the variable MEGALITE_TEST_HANG, "fault=file": the
time at which the rank began to hang is written to the file.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

RANK, HANGS_IN = 3, 6
SITE = """
import os, sys
if "-m megalite train" in " ".join(sys.orig_argv) and os.environ.get("RANK") == "3":
    from tests.support.hang_faults import plant
    plant(*os.environ["MEGALITE_TEST_HANG"].split("="))
"""


def hang(noted: Path) -> None:
    _note(noted)
    while True:
        time.sleep(1)


def stop(noted: Path) -> None:
    _note(noted)
    os.kill(os.getpid(), signal.SIGSTOP)


def _note(noted: Path) -> None:
    partial_file = noted.with_suffix(".partial")
    partial_file.write_text(str(time.time()))
    partial_file.rename(noted)


def plant(fault: str, file: str) -> None:
    """Have this process hang in its sixth step, at the place that FAULTS names."""
    where, does = FAULTS[fault]
    where(partial(does, Path(file)))


def _in_forward(does: Callable[[], None]) -> None:
    _in_mlp("register_forward_hook", does)


def _in_backward(does: Callable[[], None]) -> None:
    _in_mlp("register_full_backward_hook", does)


def _in_mlp(register: str, does: Callable[[], None]) -> None:
    from megalite.train.step.train_step import TrainStep

    initialise = TrainStep.__init__

    def made(trainer: TrainStep, *arguments: Any, **named: Any) -> None:
        initialise(trainer, *arguments, **named)
        module = next(module for name, module in trainer.stage.named_modules() if name.endswith("mlp"))

        def hook(*_: Any) -> None:
            if trainer.state.step == HANGS_IN - 1:
                does()

        getattr(module, register)(hook)

    TrainStep.__init__ = made  # type: ignore[method-assign]


def _in_data(does: Callable[[], None]) -> None:
    from megalite.data.batches.loader import StepLoader

    step_batch = StepLoader.step_batch

    def read(loader: StepLoader, samples: int, **arguments: Any) -> Any:
        if samples >= loader.global_batch_size * HANGS_IN:  # a batch is read in the step before it
            does()
        return step_batch(loader, samples, **arguments)

    StepLoader.step_batch = read  # type: ignore[method-assign]


def _in_callback(does: Callable[[], None]) -> None:
    from megalite.train.callbacks import Callbacks

    step_end = Callbacks.step_end

    def ended(callbacks: Callbacks, report: Any) -> dict[str, float]:
        if report.step == HANGS_IN - 1:
            does()
        return step_end(callbacks, report)

    Callbacks.step_end = ended  # type: ignore[method-assign]


def _in_save(does: Callable[[], None]) -> None:
    from megalite.checkpoint import unpublished

    unpublished.write_tensor_file = lambda *_: does()  # type: ignore[assignment]


def _in_another_collective(does: Callable[[], None]) -> None:
    from megalite.train.step.train_step import TrainStep

    train_step = TrainStep.train_step

    def step(trainer: TrainStep, *arguments: Any) -> Any:
        if trainer.state.step == HANGS_IN - 1:
            does()
            trainer.mesh.barrier()
        return train_step(trainer, *arguments)

    TrainStep.train_step = step  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Callable[[Callable[[], None]], None], Callable[[Path], None]]] = {
    "forward": (_in_forward, hang),
    "backward": (_in_backward, hang),
    "data": (_in_data, hang),
    "callback": (_in_callback, hang),
    "save": (_in_save, hang),
    "stopped": (_in_callback, stop),
    "left": (_in_another_collective, _note),
}
