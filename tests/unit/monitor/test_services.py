"""Weights & Biases and MLflow: a killed client, a service that does not answer, and the end of a run without it."""

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.monitor.mlflow_run import MlflowRun
from megalite.monitor.sinks import RunSinks
from megalite.monitor.wandb_run import WandbRun
from tests.support import mlflow_stand_in
from tests.support.sink_readers import wait_for_wandb, wandb_curves
from tests.support.waiting import PATIENCE
from tests.unit.monitor.test_sinks import reported

STEPS = 400


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    return tmp_path


def opened(folder: Path, after_step: int = -1) -> RunSinks:
    return RunSinks(
        reported(folder, after_step, report_to=["wandb"]), folder / "metrics.jsonl", warn=pytest.fail
    )


def test_what_a_kill_took_from_the_client_comes_from_the_resumed_run(offline: Path) -> None:
    sinks = opened(offline)
    for step in range(1, STEPS + 1):
        sinks.append({"step": step, "loss": 1.0 * step, "grad_norm": 0.5})
    sinks.close(0)
    wait_for_wandb(offline)
    [file] = (offline / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    written = [(step, 0.0) for step in range(STEPS)]
    # As a kill leaves it: whole blocks of 32 KB, as many as lack some of the steps.
    blocks = len(content) // 32768
    while len(written) >= STEPS - 10:
        file.write_bytes(content[: 32768 * blocks])
        written, blocks = wandb_curves(offline)["train/loss"], blocks - 1
    assert len(written) > 1
    # In a second, or the resumed run would have the same folder.
    file.parent.rename(
        file.parent.with_name(f"offline-run-20200101_000000-{file.parent.name.split('-')[-1]}")
    )
    resumed = opened(offline, STEPS - 5)
    for step in range(STEPS - 4, STEPS + 3):
        resumed.append({"step": step, "loss": 1.0 * step, "grad_norm": 0.5})
    resumed.close(0)
    wait_for_wandb(offline)
    assert wandb_curves(offline)["train/loss"] == [(step, 1.0 * step) for step in range(1, STEPS + 3)]


def test_a_service_that_does_not_answer_leaves_an_offline_run(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def unreachable(**_: Any) -> bool:
        raise wandb.errors.CommError("no route to host")

    monkeypatch.setattr(wandb, "setup", lambda: SimpleNamespace(settings=SimpleNamespace(mode="online")))
    monkeypatch.setattr(wandb, "login", unreachable)
    sink = WandbRun(reported(offline))
    sink.append({"step": 1, "loss": 2.0})
    sink.close(0)
    assert sink.note == f"wandb writes to {sink.place} alone, which wandb sync sends later: no route to host"
    wait_for_wandb(offline)
    assert wandb_curves(offline)["train/loss"] == [(1, 2.0)]


def test_records_that_do_not_arrive_at_the_end_are_one_warning_with_the_command(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    said: list[str] = []
    sinks = RunSinks(reported(offline, report_to=["wandb"]), offline / "metrics.jsonl", said.append)
    folder = sinks.places["wandb"]
    finish = wandb.Run.finish

    def timed_out(run: Any, exit_code: int) -> None:
        finish(run, exit_code=exit_code)
        raise TimeoutError("Timed out finishing run.")

    monkeypatch.setattr(wandb.Run, "finish", timed_out)
    sinks.append({"step": 1, "loss": 2.0})
    sinks.close(0)
    assert [text.partition("; metrics")[0] for text in said] == [
        "monitor.report_to: wandb gets no more records: the last ones have not arrived; "
        f"wandb sync {folder} sends them"
    ]


class Away(ConnectionError):
    pass


def test_a_server_that_was_away_gets_its_records_and_a_resumed_run_fills_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow_stand_in.put_in_place(monkeypatch)
    from mlflow import MlflowClient

    if MlflowClient is not mlflow_stand_in.MlflowClient:
        pytest.skip("needs the stand-in")
    monkeypatch.setattr("megalite.monitor.mlflow_run.PAUSE_SECONDS", 0.001)
    log_batch, tried, answers = MlflowClient.log_batch, queue.Queue[int](), threading.Event()

    def away(client: Any, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if metrics and not answers.is_set():
            tried.put(1)
            raise Away("connection refused")
        log_batch(client, run_id, metrics, params)

    monkeypatch.setattr(MlflowClient, "log_batch", away)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{tmp_path.name}")
    sink = MlflowRun(reported(tmp_path))
    for step in (1, 2, 3):
        sink.append({"step": step, "loss": 1.0})
    for _ in range(3):
        tried.get(timeout=PATIENCE)
    answers.set()
    sink.close(0)
    resumed = MlflowRun(reported(tmp_path, 5))
    assert resumed.reported_step == 3
    resumed.close(0)


def test_a_server_that_stays_away_ends_its_records_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow_stand_in.put_in_place(monkeypatch)
    from mlflow import MlflowClient

    if MlflowClient is not mlflow_stand_in.MlflowClient:
        pytest.skip("needs the stand-in")
    monkeypatch.setattr("megalite.monitor.mlflow_run.MOST_RECORDS", 2)
    log_batch, answers = MlflowClient.log_batch, threading.Event()

    def silent(client: Any, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if metrics:
            answers.wait(PATIENCE)
        log_batch(client, run_id, metrics, params)

    monkeypatch.setattr(MlflowClient, "log_batch", silent)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{tmp_path.name}")
    sink = MlflowRun(reported(tmp_path))
    with pytest.raises(TimeoutError, match="2 records wait for the server"):
        for step in range(1, 5):
            sink.append({"step": step, "loss": 1.0})
    answers.set()
    sink.close(0)
