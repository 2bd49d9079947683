"""TensorBoard event files; each step occurs once, even after kills and resumes."""

from collections.abc import Mapping
from pathlib import Path


class TensorBoardFile:
    """Appends scalars to a new event file in a folder; they are written when `add` returns."""

    def __init__(self, folder: Path, *, after_step: int):
        """Continue after step `after_step`: TensorBoard ignores later steps of earlier files."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of one step: tag -> value."""
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
