"""MLflow: a run of the tracking server of MLFLOW_TRACKING_URI, or one in the folder mlruns of the run folder."""

import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from typing import Any

from megalite.launcher.rank.environment import variables
from megalite.monitor.metrics import curves
from megalite.monitor.sink import ReportedRun, Sink

# MLflow's limits of one request.
_METRICS, _PARAMETERS = 1000, 100
_LAST_SECONDS = 30.0
# A request that gets no answer is tried again; both hold up the start of a run and an upload, and only a thread later.
_REQUEST_SECONDS, _REQUEST_RETRIES = 10, 2
# The thread waits for a server that is away, until so many records wait.
PAUSE_SECONDS, MOST_RECORDS = 10.0, 10_000


class MlflowRun(Sink):
    """Reports to one run of MLflow, whose id stands in the run folder, from a thread: a slow server delays no step."""

    module = "mlflow"
    package = "mlflow-skinny"

    def __init__(self, run: ReportedRun):
        from mlflow import MlflowClient
        from mlflow import environment_variables as settings

        environ = variables()
        for name, value in (("TIMEOUT", _REQUEST_SECONDS), ("MAX_RETRIES", _REQUEST_RETRIES)):
            if f"MLFLOW_HTTP_REQUEST_{name}" not in environ:
                getattr(settings, f"MLFLOW_HTTP_REQUEST_{name}").set(value)
        self._uri = environ.get("MLFLOW_TRACKING_URI", "")
        if not self._uri:
            # The light client has no database, and files need this permission.
            settings.MLFLOW_ALLOW_FILE_STORE.set(True)
            self._uri = (run.folder / "mlruns").absolute().as_uri()
        self._client = MlflowClient(self._uri)
        stored = run.read_id("mlflow")
        self.reported_step, self._skipped_to = run.after_step, -1
        if stored:
            self._client.update_run(stored, status="RUNNING")
            losses = self._client.get_metric_history(stored, "train/loss")
            self.reported_step = self._skipped_to = max((metric.step for metric in losses), default=-1)
        self._id = stored or self._new_run(run, environ.get("MLFLOW_EXPERIMENT_NAME"))
        self._queue: Queue[tuple[list[Any], str]] = Queue(MOST_RECORDS)
        self._failure: Exception | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        return self._uri

    def append(self, record: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        if self._failure is not None:
            raise self._failure
        if record["step"] > self._skipped_to:
            now = int(time.time() * 1000)
            numbers = curves(record).items()
            metrics = [Metric(_key(name), float(value), now, record["step"]) for name, value in numbers]
            try:
                self._queue.put_nowait((metrics, ""))
            except Full as error:
                raise TimeoutError(f"{MOST_RECORDS:,} records wait for the server") from error

    def checkpoint(self, path: Path) -> None:
        """Upload a checkpoint; training waits for it."""
        self._client.log_artifacts(self._id, str(path), f"checkpoints/{path.name}")

    def close(self, exit_code: int) -> None:
        self._ends.set()
        status = {0: "FINISHED", 75: "KILLED", 130: "KILLED"}.get(exit_code, "FAILED")
        with suppress(Full):
            self._queue.put(([], status), timeout=_LAST_SECONDS)
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
                    self._send_batch(metrics[start : start + _METRICS])
            self._client.set_terminated(self._id, status)
        # The client may raise anything; `append` or `close` raises it in the thread of the run.
        except Exception as error:
            self._failure = error

    def _send_batch(self, metrics: list[Any]) -> None:
        """Send metrics of one request, again and again while the server is away and the run goes on."""
        while True:
            try:
                self._client.log_batch(self._id, metrics)
                return
            except Exception as error:
                if self._ends.is_set() or not _is_away(error):
                    raise
            self._ends.wait(PAUSE_SECONDS)


def _is_away(error: Exception) -> bool:
    """Whether a request failed because the server did not answer, or could not."""
    status = getattr(error, "get_http_status_code", lambda: 0)()
    return bool(status >= 500 or isinstance(error, ConnectionError | TimeoutError))


def _key(name: str) -> str:
    """Return a name with the characters that MLflow takes; a file store could not have train/a beside train/a/b."""
    first, slash, rest = name.partition("/")
    return re.sub(r"[^\w\-. /:]", "_", f"{first}{slash}{rest.replace('/', '.')}")
