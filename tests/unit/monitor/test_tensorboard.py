"""TensorBoard's curves hold each step once, however often a run was resumed."""

from pathlib import Path

import pytest

from megalite.monitor.sink import ReportedRun
from megalite.monitor.tensorboard import TensorBoardFile
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.unit.config.runs import load


@exhibit(
    "Megatron-LM PR#5121",
    subject="records",
    there="event files of runs that ended early broke the curves at the next start, or doubled their steps",
    here="a resumed run goes on with its curves, each step once",
    fault=faults.CURVES_KEEP_LATER_STEPS,
)
def test_a_resumed_run_goes_on_with_its_curves_without_doubles(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = load(tmp_path, {"monitor.tensorboard_folder": str(tmp_path / "curves")}).config
    for first, last, loss in ((0, 6, 3.0), (4, 8, 2.0)):
        sink = TensorBoardFile(ReportedRun(tmp_path, config, after_step=first - 1))
        for step in range(first, last):
            sink.append({"step": step, "loss": loss, "mfu": None})
        # Added values are on disk at once: the first run is killed, not closed.
    events = EventAccumulator(str(tmp_path / "curves")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        *((step, 3.0) for step in range(4)),
        *((step, 2.0) for step in range(4, 8)),
    ]
