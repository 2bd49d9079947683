"""The numbers of a run as TensorBoard's event files, each step once, however often the run was killed."""

from collections.abc import Mapping
from pathlib import Path


class TensorBoardFile:
    """Appends scalars to a new event file of a folder; they are in it when `add` returns."""

    def __init__(self, folder: Path, *, after_step: int):
        """Go on after step `after_step`: TensorBoard leaves out what earlier files have of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the values of one step, by tag."""
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
