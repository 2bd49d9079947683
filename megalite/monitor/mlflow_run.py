"""MLflow: a run of the tracking server of MLFLOW_TRACKING_URI, or one in the folder mlruns of the run folder."""

import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megalite.launcher.rank.environment import variables
from megalite.monitor.metrics import curves
from megalite.monitor.sink import ReportedRun, Sink

# MLflow's limits of one request.
_METRICS, _PARAMETERS = 1000, 100
_LAST_SECONDS = 60.0


class MlflowRun(Sink):
    """Reports to one run of MLflow, whose id stands in the run folder, from a thread: a slow server delays no step."""

    module = "mlflow"
    package = "mlflow-skinny"

    def __init__(self, run: ReportedRun):
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE

        environ = variables()
        self._uri = environ.get("MLFLOW_TRACKING_URI", "")
        if not self._uri:
            # The light client has no database, and files need this permission.
            MLFLOW_ALLOW_FILE_STORE.set(True)
            self._uri = (run.folder / "mlruns").absolute().as_uri()
        self._client = MlflowClient(self._uri)
        stored = run.read_id("mlflow")
        self._recorded_step = run.recorded_step if stored else -1
        if stored:
            self._client.update_run(stored, status="RUNNING")
        self._id = stored or self._new_run(run, environ.get("MLFLOW_EXPERIMENT_NAME"))
        self._queue: SimpleQueue[tuple[list[Any], str]] = SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        return self._uri

    def append(self, record: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        if self._failure is not None:
            raise self._failure
        if record["step"] > self._recorded_step:
            now = int(time.time() * 1000)
            numbers = curves(record).items()
            metrics = [Metric(_key(name), float(value), now, record["step"]) for name, value in numbers]
            self._queue.put((metrics, ""))

    def checkpoint(self, path: Path) -> None:
        """Upload a checkpoint; training waits for it."""
        self._client.log_artifacts(self._id, str(path), f"checkpoints/{path.name}")

    def close(self, exit_code: int) -> None:
        self._queue.put(([], {0: "FINISHED", 75: "KILLED", 130: "KILLED"}.get(exit_code, "FAILED")))
        self._thread.join(_LAST_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"the server has not taken the last records in {_LAST_SECONDS:g} s")
        if self._failure is not None:
            raise self._failure

    def _new_run(self, run: ReportedRun, experiment_of_variable: str | None) -> str:
        from mlflow.entities import Param

        name = run.monitor.project or experiment_of_variable or "Default"
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        run_id: str = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        settings = [
            Param(_key(f"{section}.{key}"), str(value))
            for section, table in run.config.model_dump(mode="json").items()
            for key, value in (table or {}).items()
            if value is not None
        ]
        for start in range(0, len(settings), _PARAMETERS):
            self._client.log_batch(run_id, params=settings[start : start + _PARAMETERS])
        run.write_id("mlflow", run_id)
        return run_id

    def _send(self) -> None:
        """Send what is in the queue, several records at once where they wait, until the last status comes."""
        status = ""
        try:
            while not status:
                metrics, status = self._queue.get()
                while not status and len(metrics) < _METRICS // 2 and not self._queue.empty():
                    more, status = self._queue.get()
                    metrics = [*metrics, *more]
                for start in range(0, len(metrics), _METRICS):
                    self._client.log_batch(self._id, metrics[start : start + _METRICS])
            self._client.set_terminated(self._id, status)
        # The client may raise anything; `append` or `close` raises it in the thread of the run.
        except Exception as error:
            self._failure = error


def _key(name: str) -> str:
    """Return a name with the characters that MLflow takes; a file store could not have train/a beside train/a/b."""
    first, slash, rest = name.partition("/")
    return re.sub(r"[^\w\-. /:]", "_", f"{first}{slash}{rest.replace('/', '.')}")
