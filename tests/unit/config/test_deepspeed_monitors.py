"""The monitors of a DeepSpeed file turn on the sinks of monitor.report_to, with their names and folders."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.runs import load, problems

ENABLED: dict[str, dict[str, Any]] = {
    "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "first"},
    "csv_monitor": {"enabled": True, "output_path": "tables"},
    "wandb": {"enabled": True, "project": "books", "group": "night", "team": "ours"},
}
NAMED = {
    "report_to": ("csv", "tensorboard", "wandb"),
    "tensorboard_folder": "logs/first",
    "csv_folder": "tables/DeepSpeedJobName",
    "project": "books",
    "group": "night",
    "entity": "ours",
}


def test_an_enabled_block_is_its_sink_with_its_names(tmp_path: Path) -> None:
    loaded = load(tmp_path, ds_json=ENABLED)
    monitor = loaded.config.monitor
    assert {key: getattr(monitor, key) for key in NAMED} == NAMED
    assert not loaded.notes and not set(ENABLED) & set(loaded.config.deepspeed_json())
    assert loaded.origin("monitor.project") == "wandb.project in ds.json"


def test_a_block_that_is_off_or_has_no_names_leaves_the_defaults(tmp_path: Path) -> None:
    blocks = {"tensorboard": {"enabled": True}, "wandb": {"enabled": False, "project": "books"}}
    monitor = load(tmp_path, {"monitor.report_to": ["mlflow"]}, ds_json=blocks).config.monitor
    assert monitor.report_to == ("mlflow", "tensorboard")
    assert monitor.project is None and monitor.tensorboard_folder is None


@pytest.mark.parametrize(("flag", "left"), [("[]", ()), ('["mlflow"]', ("mlflow",)), ("unset", ())])
def test_a_flag_names_the_sinks_alone(tmp_path: Path, flag: str, left: tuple[str, ...]) -> None:
    loaded = load(tmp_path, ds_json=ENABLED, flags=["--monitor.report_to", flag])
    assert loaded.config.monitor.report_to == left


@pytest.mark.parametrize(
    ("block", "key", "message"),
    [
        ({"wandb": {"enabled": "yes"}}, "ds.json: wandb.enabled", "should be true or false"),
        (
            {"csv_monitor": {"enabled": True, "job_name": 5}},
            "ds.json: csv_monitor.job_name",
            "should be text",
        ),
        (
            {"wandb": {"enabled": True, "project": 5}},
            "monitor.project",
            "(wandb.project in ds.json) should be",
        ),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, block: dict[str, Any], key: str, message: str) -> None:
    [problem] = problems(tmp_path, ds_json=block)
    assert problem.key == key and message in problem.message


def test_a_project_of_both_files_must_agree(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, {"monitor.project": "films"}, ds_json={"wandb": ENABLED["wandb"]})
    assert problem.key == "monitor.project" and '"books" (wandb.project in ds.json)' in problem.message
