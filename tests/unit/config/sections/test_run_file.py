"""A run file in YAML or JSON is the run of the TOML file, and what is wrong in it is said with its line."""

import json
from pathlib import Path

import pytest
import yaml

from megalite.config.load import load_run
from megalite.errors import ConfigError
from tests.unit.config.runs import changed, write_run

CHANGES = {
    "optimizer.learning_rate": 1e-4,
    "optimizer.betas": [0.9, 0.99],
    "data.shuffle": False,
    "data.source": ["a.txt", "b.txt"],
    "deepspeed.zero_optimization": {"stage": 1},
    "optimizer.groups": [{"pattern": "*norm*", "weight_decay": 0.0}],
}


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_the_run_is_that_of_the_toml_file(tmp_path: Path, suffix: str) -> None:
    tables = changed(CHANGES)
    text = json.dumps(tables) if suffix == "json" else yaml.safe_dump(tables)
    loaded = load_run(written(tmp_path, f"run.{suffix}", text), ["--training.steps", "7"])
    assert loaded.config == load_run(write_run(tmp_path, tables), ["--training.steps", "7"]).config
    assert loaded.origin("data.source") == str(tmp_path / f"run.{suffix}")


def test_yaml_has_numbers_without_a_point_switches_and_empty_sections(tmp_path: Path) -> None:
    text = yaml.safe_dump(changed({"optimizer": {}, "data.shuffle": True}))
    text = text.replace("optimizer: {}", "optimizer: {learning_rate: 1e-4, momentum: null}\nmonitor:")
    config = load_run(written(tmp_path, "run.yaml", text.replace("shuffle: true", "shuffle: off"))).config
    assert (config.optimizer.learning_rate, config.data.shuffle, config.monitor.every) == (1e-4, False, 1)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("run.yaml", "training:\n  steps: 1\n  steps: 2\n", "line 3: the key steps is already in line 2"),
        ("run.yaml", "training:\n  steps: [1\n", "line 3, column 1: "),
        ("run.yaml", "training: !!python/object:os.system {}\n", "line 1: the tag"),
        ("run.json", '{\n"training": {"steps": 1,}}', "line 2, column 25: "),
        ("run.json", "[1]", "holds no mapping"),
        ("run.yml", "training:\n  stop_after: 1:30:00\n", 'training.stop_after: "1:30:00" is not a duration'),
        ("run.yml", "training:\n  compile: 'on'\n", 'training.compile: "on" should be true or false'),
        ("run.yml", "training:\n  precision: off\n", 'training.precision: false should be "auto"'),
        ("run.yml", "training:\n  steps: 1e3\n", "training.steps: 1000.0 should be a whole number"),
        ("run.yml", "optimizer:\n  name: null\n", 'optimizer.name: null should be "adamw"'),
        ("run.yml", "optimiser:\n  name: sgd\n", "optimiser: unknown section; did you mean optimizer?"),
    ],
)
def test_a_wrong_file_is_a_clear_error(tmp_path: Path, name: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_run(written(tmp_path, name, text))
    assert problem in str(refused.value) and str(tmp_path / name) in str(refused.value)


def test_a_missing_file_names_those_of_its_kind(tmp_path: Path) -> None:
    written(tmp_path, "other.yaml", "")
    with pytest.raises(ConfigError) as refused:
        load_run(tmp_path / "run.yaml")
    assert "other.yaml" in str(refused.value)
