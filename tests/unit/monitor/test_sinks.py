"""The sinks of monitor.report_to: absent packages, a table that grows, and failures that do not end a run."""

import csv
import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megalite.config.sections.monitor_section import MonitorConfig
from megalite.errors import ConfigError
from megalite.monitor import sinks
from megalite.monitor.csv_file import CsvFile
from megalite.monitor.jsonl import read_metrics
from megalite.monitor.metrics import curves
from megalite.monitor.sink import ReportedRun, Sink
from megalite.monitor.sinks import SINKS, RunSinks
from megalite.monitor.wandb_run import WandbRun
from megalite.train.run import Trainer
from tests.unit.config.runs import load, problems


def reported(folder: Path, after_step: int = -1, **monitor: Any) -> ReportedRun:
    config = load(folder, {f"monitor.{key}": value for key, value in monitor.items()}).config
    return ReportedRun(folder, config, after_step=after_step)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_word_of_the_setting_has_its_sink(tmp_path: Path) -> None:
    assert MonitorConfig(report_to=[*SINKS]).report_to == tuple(SINKS)
    [problem] = problems(tmp_path, {"monitor.report_to": ["tensorbord"]})
    assert problem.key == "monitor.report_to" and '"mlflow"' in problem.message


@pytest.mark.parametrize(
    ("word", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow-skinny")]
)
def test_an_absent_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, package: str
) -> None:
    config = load(tmp_path, {"monitor.report_to": ["csv", word]}).config
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = rf"monitor\.report_to: {word} needs the package {package}, .*pip install {package}\)"
    with pytest.raises(ConfigError, match=said):
        Trainer(config).run("run.toml")


def test_a_folder_with_the_name_of_a_package_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "absent_service").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(WandbRun, "module", "absent_service")
    assert [problem.key for problem in sinks.absent_packages(["wandb"])] == ["monitor.report_to"]


def test_the_switch_of_before_is_refused_with_the_list_that_replaces_it(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, {"monitor.tensorboard": True})
    assert problem.key == "monitor.tensorboard" and 'report_to = ["tensorboard"]' in problem.remedy


def test_settings_of_a_sink_that_is_off_are_noted(tmp_path: Path) -> None:
    changes = {"monitor.report_to": ["mlflow"], "monitor.project": "p", "monitor.group": "g"}
    [note] = load(tmp_path, changes).notes
    assert note == 'monitor.group has no effect without "wandb" in monitor.report_to'


def test_curves_have_the_names_of_their_kind() -> None:
    record = {"step": 3, "loss": 1.0, "mfu": None, "validation_loss": 2.0, "checkpoint_step": 2, "mine": 4.0}
    assert curves(record | {"learning_rate/*norm*": 0.5, "trained_parameters": 9}) == {
        "train/loss": 1.0,
        "validation/loss": 2.0,
        "checkpoint/step": 2,
        "mine": 4.0,
        "train/learning_rate/*norm*": 0.5,
        "train/trained_parameters": 9,
    }


def test_a_table_has_every_step_once_and_takes_new_columns(tmp_path: Path) -> None:
    table = tmp_path / "tables" / "metrics.csv"
    sink = CsvFile(reported(tmp_path, csv_folder=str(table.parent)))
    for step in (1, 2, 3):
        sink.append({"step": step, "loss": 0.1 * step, "mfu": None})
    with table.open("a") as file:
        file.write("4,0.")  # the process was killed while it wrote
    sink = CsvFile(reported(tmp_path, 2, csv_folder=str(table.parent)))
    sink.append({"step": 3, "loss": 5.0, "mfu": None, "validation_loss": 7.0})
    sink.append({"loss": 4.5, "step": 4, "mfu": 0.5})
    sink.close(0)
    columns = [[row[name] for row in rows(table)] for name in ("step", "loss", "mfu", "validation_loss")]
    assert columns == [
        ["1", "2", "3", "4"],
        ["0.1", "0.2", "5.0", "4.5"],
        ["", "", "", "0.5"],
        ["", "", "7.0", ""],
    ]
    assert sorted(path.name for path in table.parent.iterdir()) == ["metrics.csv"]


def test_a_row_that_is_cut_off_in_its_last_number_is_removed(tmp_path: Path) -> None:
    sink, table = CsvFile(reported(tmp_path)), tmp_path / "metrics.csv"
    for step in (1, 2):
        sink.append({"step": step, "loss": 0.25 * step})
    sink.close(0)
    table.write_bytes(table.read_bytes()[:-3])
    CsvFile(reported(tmp_path, 2)).close(0)
    assert rows(table) == [{"step": "1", "loss": "0.25"}]


def test_a_folder_of_tables_keeps_those_of_other_runs(tmp_path: Path) -> None:
    for run, loss in enumerate((1.0, 2.0, 3.0)):
        sink = CsvFile(reported(tmp_path, csv_folder=str(tmp_path / "tables")))
        sink.append({"step": 1, "run": run, "loss": loss})
        sink.close(0)
    tables = {path.name: rows(path)[0]["loss"] for path in (tmp_path / "tables").iterdir()}
    assert tables == {"metrics-1.csv": "1.0", "metrics-2.csv": "2.0", "metrics.csv": "3.0"}


class FullDisk(Sink):
    """Takes one record, and has no address."""

    closed: list[int]
    place = None

    def __init__(self, run: ReportedRun):
        self._taken, FullDisk.closed = 0, []

    def append(self, record: Mapping[str, Any]) -> None:
        self._taken += 1
        if self._taken > 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self, exit_code: int) -> None:
        FullDisk.closed.append(exit_code)


class Unreachable(FullDisk):
    """Cannot be opened."""

    def __init__(self, run: ReportedRun):
        raise ConnectionError("no route\nto https://me:secret@host/api")


class Served(FullDisk):
    """Has an address with a login."""

    place = "https://me:secret@host/runs/1"


class Resumed(Served):
    """Has lost what came after step 2."""

    reported_step = 2
    note = "https://me:secret@host is away"
    taken: list[int]

    def __init__(self, run: ReportedRun):
        Resumed.taken = []

    def append(self, record: Mapping[str, Any]) -> None:
        Resumed.taken.append(record["step"])


def test_a_service_gets_the_records_that_it_lost_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "SINKS", {"mlflow": Resumed})
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 8)))
    said: list[str] = []
    every = RunSinks(reported(tmp_path, 5, report_to=["mlflow"]), tmp_path / "metrics.jsonl", said.append)
    every.append({"step": 6})
    assert Resumed.taken == [3, 4, 5, 6]
    assert said == ["monitor.report_to: https://host is away"]


def test_the_summary_has_no_login_and_no_place_of_a_service_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "SINKS", {"mlflow": Served, "wandb": FullDisk})
    run = reported(tmp_path, report_to=["mlflow", "wandb"])
    opened = RunSinks(run, tmp_path / "metrics.jsonl", pytest.fail)
    assert opened.places == {"mlflow": "https://host/runs/1"}
    opened.close(0)


def test_a_sink_that_fails_is_warned_of_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sinks, "SINKS", {"tensorboard": FullDisk, "wandb": Unreachable, "csv": CsvFile})
    run = reported(tmp_path, report_to=["tensorboard", "wandb", "csv"])
    every = RunSinks(run, tmp_path / "metrics.jsonl", said.append)
    for step in (1, 2, 3):
        every.append({"step": step, "loss": 1.0})
    assert every.places == {"csv": tmp_path / "metrics.csv"}
    every.close(0)
    every.close(1)
    assert said == [
        "monitor.report_to: wandb gets no more records: no route to https://host/api; metrics.jsonl has all of them",
        "monitor.report_to: tensorboard gets no more records: [Errno 28] No space left on device; "
        "metrics.jsonl has all of them",
    ]
    assert FullDisk.closed == [1]
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["1", "2", "3"]
