"""A sink of a run's records besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, a CSV file."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megalite.config.sections.monitor_section import MonitorConfig
from megalite.config.sections.schema import RunConfig


@dataclass(frozen=True)
class ReportedRun:
    """The run as its sinks see it.

    after_step: the step that this start goes on from; -1: it starts from the beginning.
    """

    folder: Path
    config: RunConfig
    after_step: int

    @property
    def monitor(self) -> MonitorConfig:
        return self.config.monitor

    @property
    def name(self) -> str:
        return self.monitor.run_name or self.folder.name

    def read_id(self, service: str) -> str | None:
        """Return the id under which an earlier start reported to a service; None for a run from the beginning."""
        file = self._id_file(service)
        return file.read_text().strip() if self.after_step >= 0 and file.exists() else None

    def write_id(self, service: str, run_id: str) -> None:
        self._id_file(service).write_text(f"{run_id}\n")

    def _id_file(self, service: str) -> Path:
        return self.folder / f"{service}-run-id"


class Sink(ABC):
    """Receives the records of a run in the order of their steps, on rank 0. Any method may raise, and is then the last.

    module, package: the Python module that it needs, and what pip installs; "": none.
    """

    module: ClassVar[str] = ""
    package: ClassVar[str] = ""
    note: str = ""
    """A warning for the user about how the sink was opened."""
    reported_step: int | None = None
    """The last step that a resumed run has reported before, to which the records in between are handed; None: all."""

    @abstractmethod
    def __init__(self, run: ReportedRun):
        """Open the sink; a resumed run goes on where it stopped, and no step is reported twice."""

    @property
    @abstractmethod
    def place(self) -> str | Path | None:
        """Where a person finds the records; None: the service is switched off, as with WANDB_MODE=disabled."""

    @abstractmethod
    def append(self, record: Mapping[str, Any]) -> None:
        """Take a record of metrics.jsonl, whose floats may be inf or nan."""

    def checkpoint(self, path: Path) -> None:  # noqa: B027 - most sinks take no files
        """Take the files of a published checkpoint; a sink without files does nothing."""

    @abstractmethod
    def close(self, exit_code: int) -> None:
        """Finish; exit_code: that of the run, 0 after its last step, 75 or 130 where it stopped before."""
