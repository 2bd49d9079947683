"""All sinks of a run: metrics.jsonl, which must be written, and those of monitor.report_to, which may fail."""

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.errors import Problem
from megalite.launcher.process import within
from megalite.monitor.csv_file import CsvFile
from megalite.monitor.jsonl import MetricsFile, read_metrics
from megalite.monitor.mlflow_run import MlflowRun
from megalite.monitor.sink import ReportedRun, Sink
from megalite.monitor.tensorboard import TensorBoardFile
from megalite.monitor.wandb_run import WandbRun

SINKS: Mapping[str, type[Sink]] = {
    "tensorboard": TensorBoardFile,
    "wandb": WandbRun,
    "mlflow": MlflowRun,
    "csv": CsvFile,
}
"""Word of monitor.report_to -> its sink."""
# A rank that fails or stops is waited for by others, so that no service may hold it up.
_SECONDS_AT_A_STOP = 8.0
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")


class RunSinks:
    """Hands every record to metrics.jsonl and to the sinks of monitor.report_to, on rank 0.

    A sink that raises is warned of once and gets nothing more; an error of metrics.jsonl ends the run.
    """

    def __init__(self, run: ReportedRun, metrics: Path, warn: Callable[[str], None]):
        self._metrics, self._warn = MetricsFile(metrics, after_step=run.after_step), warn
        self._opened: dict[str, Sink] = {}
        for name in dict.fromkeys(run.monitor.report_to):
            try:
                self._opened[name] = sink = SINKS[name](run)
                if sink.note:
                    warn(f"monitor.report_to: {_without_login(sink.note)}")
                if sink.reported_step is not None and run.after_step > sink.reported_step:
                    _hand_lost(sink, sink.reported_step, metrics)
            # A service's client may raise anything.
            except Exception as error:
                self._opened.pop(name, None)
                self._tell(name, error)

    @property
    def places(self) -> dict[str, str | Path]:
        """Name -> where a person finds the records, of each sink that has not failed and has a place."""
        places = {name: sink.place for name, sink in self._opened.items()}
        return {
            name: _without_login(place) if isinstance(place, str) else place
            for name, place in places.items()
            if place is not None
        }

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record, which has the key "step"."""
        self._metrics.append(record)
        self._each(lambda sink: sink.append(record))

    def checkpoint(self, path: Path) -> None:
        """Hand on a checkpoint that was published."""
        self._each(lambda sink: sink.checkpoint(path))

    def close(self, exit_code: int) -> None:
        """Finish every sink; within seconds unless the run came to its end. The second call does nothing."""
        if exit_code == 0:
            self._finish(exit_code)
        else:
            within(_SECONDS_AT_A_STOP, lambda: self._finish(exit_code), None)

    def _finish(self, exit_code: int) -> None:
        self._each(lambda sink: sink.close(exit_code))
        self._opened.clear()
        self._metrics.close()

    def _each(self, action: Callable[[Sink], None]) -> None:
        for name, sink in list(self._opened.items()):
            try:
                action(sink)
            except Exception as error:
                del self._opened[name]
                within(_SECONDS_AT_A_STOP, lambda sink=sink: sink.close(1), None)  # type: ignore[misc]
                self._tell(name, error)

    def _tell(self, name: str, error: Exception) -> None:
        text = _without_login(" ".join(str(error).split())) or type(error).__name__
        self._warn(f"monitor.report_to: {name} gets no more records: {text}; metrics.jsonl has all of them")


def _hand_lost(sink: Sink, reported_step: int, metrics: Path) -> None:
    """Hand a service the records that its client had in memory when an earlier start was killed."""
    for record in read_metrics(metrics):
        if record["step"] > reported_step:
            sink.append(record)


def _is_installed(module: str) -> bool:
    """Whether a package is installed; a folder of its name, as wandb makes one where it runs, is none."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def _without_login(text: str) -> str:
    """Return a text without the user and password of its addresses."""
    return _LOGIN.sub("", text)


def absent_packages(names: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each sink whose package is not installed."""
    for name in names:
        sink = SINKS[name]
        if sink.module and not _is_installed(sink.module):
            remedy = (
                f"install it (pip install {sink.package}), or leave {name} out: metrics.jsonl has its numbers"
            )
            yield Problem(
                "monitor.report_to",
                f"{name} needs the package {sink.package}, which is not installed",
                remedy,
            )
