"""TensorBoard's curves hold each step once, however often a run was resumed."""

from pathlib import Path

import pytest

from megalite.errors import ConfigError
from megalite.monitor.tensorboard import TensorBoardFile
from megalite.train.run import Trainer
from tests.unit.config.runs import load


def test_a_missing_tensorboard_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(tmp_path, {"monitor.tensorboard": True}).config
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = r"monitor\.tensorboard: .* not installed; .*pip install tensorboard"
    with pytest.raises(ConfigError, match=said):
        Trainer(config).run("run.toml")


def test_a_resumed_run_goes_on_with_its_curves_without_doubles(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last, loss in ((0, 6, 3.0), (4, 8, 2.0)):
        file = TensorBoardFile(tmp_path, after_step=first - 1)
        for step in range(first, last):
            file.add(step, {"train/loss": loss})
        # Added values are on disk at once: the first run is killed, not closed.
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [
        *((step, 3.0) for step in range(4)),
        *((step, 2.0) for step in range(4, 8)),
    ]
