"""Reads back what the sinks of monitor.report_to wrote: sink -> name of a curve -> its steps and values."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until

Curves = dict[str, list[tuple[int, float]]]
_BLOCK, _HEADER = 32768, 7
_FULL, _LAST = 1, 4


def tensorboard_curves(run: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def csv_columns(run: Path) -> Curves:
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        key: [(int(row["step"]), float(row[key])) for row in rows if row[key]]
        for key in rows[0]
        if key != "step"
    }


def wandb_records(run: Path) -> list[Any]:
    """Return the protocol records of all offline runs of a folder, in the order of their start."""
    return [
        record
        for file in sorted((run / "wandb").glob("offline-run-*/*.wandb"))
        for record in _wandb_file(file.read_bytes())
    ]


def wait_for_wandb(run: Path, ended: int = 1) -> None:
    """Wait for the last record of so many offline runs: wandb's own process writes them after the client's `finish`."""

    from google.protobuf.message import DecodeError

    def exits() -> int:
        try:
            return sum(record.HasField("exit") for record in wandb_records(run))
        except DecodeError:  # the last one is there in part
            return 0

    wait_until(lambda: exits() >= ended, "an offline run has no last record")


def wandb_curves(run: Path) -> Curves:
    curves: Curves = {}
    for record in wandb_records(run):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for key, value in items.items():
                curves.setdefault(key, []).append((items["_step"], value))
    return curves


def wandb_checkpoints(run: Path) -> list[str]:
    """Return the names of the checkpoints that were uploaded whole, in the order of their names."""
    artifacts = [record.artifact for record in wandb_records(run) if record.HasField("artifact")]
    files = [(artifact, {file.path for file in artifact.manifest.contents}) for artifact in artifacts]
    whole = [artifact for artifact, paths in files if "manifest.json" in paths]
    return sorted({alias for artifact in whole for alias in artifact.aliases} - {"latest"})


def mlflow_checkpoints(run: Path) -> list[str]:
    """Return the names of the checkpoints that were uploaded whole, in the order of their names."""
    client, run_id = _mlflow_client(run), _mlflow_id(run)
    folders = [folder.path for folder in client.list_artifacts(run_id, "checkpoints")]
    whole = [
        folder
        for folder in folders
        if f"{folder}/manifest.json" in {file.path for file in client.list_artifacts(run_id, folder)}
    ]
    return sorted(Path(folder).name for folder in whole)


def mlflow_run(run: Path) -> Any:
    """Return MLflow's own description of the run."""
    return _mlflow_client(run).get_run(_mlflow_id(run))


def mlflow_curve(run: Path, name: str) -> list[tuple[int, float]]:
    history = _mlflow_client(run).get_metric_history(_mlflow_id(run), name)
    return [(metric.step, metric.value) for metric in history]


def _mlflow_client(run: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient((run / "mlruns").absolute().as_uri())


def _mlflow_id(run: Path) -> str:
    return (run / "mlflow-run-id").read_text().strip()


def _wandb_file(content: bytes) -> Iterator[Any]:
    """Yield the records of a file in LevelDB's log format, behind a header of wandb's own."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, parts = _HEADER, list[bytes]()
    while position < len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        parts.append(content[position + _HEADER : position + _HEADER + length])
        position += _HEADER + length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(b"".join(parts))
            parts.clear()
            yield record
