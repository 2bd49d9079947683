"""TensorBoard event files; each step occurs once, even after kills and resumes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.monitor.metrics import curves
from megalite.monitor.sink import ReportedRun, Sink


class TensorBoardFile(Sink):
    """Appends curves to a new event file in a folder; they are written when `append` returns."""

    module = package = "tensorboard"

    def __init__(self, run: ReportedRun):
        """Continue after the run's step: TensorBoard ignores later steps of earlier files."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = Path(run.monitor.tensorboard_folder or run.folder / "tensorboard")
        self._writer = SummaryWriter(str(self._folder), purge_step=run.after_step + 1)

    @property
    def place(self) -> Path:
        return self._folder

    def append(self, record: Mapping[str, Any]) -> None:
        for name, value in curves(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self, exit_code: int) -> None:
        self._writer.close()
