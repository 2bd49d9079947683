"""A stand-in for MLflow's light client, which brings 85 MB of packages: its runs live in this process.

Written after mlflow-skinny 3.17.2, with whose file store the tests that use it have passed too.
"""

import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


class MlflowClient:
    """Keeps experiments and runs by the address of their server; refuses what the service refuses."""

    servers: ClassVar[dict[str, SimpleNamespace]] = {}

    def __init__(self, uri: str):
        self._server = self.servers.setdefault(uri, SimpleNamespace(experiments={"Default": "0"}, runs={}))

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        known = self._server.experiments.get(name)
        return None if known is None else SimpleNamespace(experiment_id=known)

    def create_experiment(self, name: str) -> str:
        return self._server.experiments.setdefault(name, str(len(self._server.experiments)))

    def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
        assert experiment_id in self._server.experiments.values()
        run_id = f"run-{len(self._server.runs)}"
        info = SimpleNamespace(run_id=run_id, run_name=run_name, status="RUNNING")
        self._server.runs[run_id] = SimpleNamespace(
            info=info, data=SimpleNamespace(params={}), metrics=[], artifacts=set()
        )
        return self._server.runs[run_id]

    def update_run(self, run_id: str, status: str) -> None:
        self._server.runs[run_id].info.status = status

    set_terminated = update_run

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000 and len(params) <= 100
        assert all(re.fullmatch(r"[\w\-. /:]+", each.key) for each in (*metrics, *params))
        self._server.runs[run_id].metrics += metrics
        self._server.runs[run_id].data.params.update(params)

    def log_artifacts(self, run_id: str, local_dir: str, artifact_path: str) -> None:
        files = (path for path in Path(local_dir).rglob("*") if path.is_file())
        names = {PurePosixPath(artifact_path, *path.relative_to(local_dir).parts) for path in files}
        self._server.runs[run_id].artifacts |= names

    def list_artifacts(self, run_id: str, path: str) -> list[SimpleNamespace]:
        within = {name for name in self._server.runs[run_id].artifacts if name.is_relative_to(path)}
        depth = len(PurePosixPath(path).parts) + 1
        return [
            SimpleNamespace(path=name) for name in sorted({"/".join(name.parts[:depth]) for name in within})
        ]

    def get_run(self, run_id: str) -> SimpleNamespace:
        return self._server.runs[run_id]

    def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
        return [metric for metric in self._server.runs[run_id].metrics if metric.key == key]


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `import mlflow` find the stand-in, unless MLflow is installed."""
    try:
        import mlflow  # noqa: F401
    except ImportError:
        variables = ("ALLOW_FILE_STORE", "HTTP_REQUEST_TIMEOUT", "HTTP_REQUEST_MAX_RETRIES")
        settings = {f"MLFLOW_{name}": SimpleNamespace(set=lambda _: None) for name in variables}
        members: dict[str, dict[str, Any]] = {
            "mlflow": {
                "MlflowClient": MlflowClient,
                "environment_variables": SimpleNamespace(**settings),
            },
            "mlflow.entities": {"Metric": Metric, "Param": Param},
        }
        for name, attributes in members.items():
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None, origin=__file__)
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)
