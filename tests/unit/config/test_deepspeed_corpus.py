"""Other projects' DeepSpeed files: each is accepted with the table's settings and notes, or refused word for word."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.deepspeed.scheduler import SCHEDULERS
from megalite.errors import ConfigError
from megalite.train.step.options import schedule_of
from tests.support.parity import about
from tests.unit.config.deepspeed_corpus import NAMES, TABLE, contents, decided, load_beside_a_run

UPDATES = 30


@pytest.mark.parametrize("name", NAMES)
def test_a_file_gives_what_the_table_says(tmp_path: Path, name: str) -> None:
    expected = TABLE[name]
    try:
        loaded = load_beside_a_run(tmp_path, name)
    except ConfigError as error:
        assert [str(problem) for problem in error.problems] == expected.get("refused")
        return
    assert "refused" not in expected
    assert list(loaded.notes) == expected.get("notes", [])
    found = decided(loaded)
    assert found == expected["settings"]


def test_the_table_has_the_files_and_nothing_else() -> None:
    accepted = [name for name in NAMES if "settings" in TABLE[name]]
    assert sorted(TABLE) == NAMES
    assert len(NAMES) >= 60
    assert len(accepted) >= 40
    assert all(("settings" in each) != ("refused" in each) for each in TABLE.values())


@pytest.mark.parametrize("name", [name for name in NAMES if "settings" in TABLE[name]])
def test_deepspeed_accepts_what_it_is_handed(tmp_path: Path, name: str) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    handed = load_beside_a_run(tmp_path, name).config.deepspeed_json()
    read = config.DeepSpeedConfig(handed)
    assert read.zero_optimization_stage == handed.get("zero_optimization", {}).get("stage", 0)
    assert read.gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    "name", [name for name in NAMES if contents(name).get("scheduler") and "settings" in TABLE[name]]
)
def test_every_update_has_the_rate_that_deepspeed_would_give_it(tmp_path: Path, name: str) -> None:
    """With the values of the run where the file says "auto", as transformers and accelerate fill them in."""
    lr_schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    config = load_beside_a_run(tmp_path, name).config
    block: dict[str, Any] = contents(name)["scheduler"]
    filled = {
        "total_num_steps": config.optimizer.decay_steps or UPDATES,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": config.optimizer.learning_rate,
        "warmup_num_steps": max(1, config.optimizer.warmup_steps),
    }
    params = {key: filled[key] if value == "auto" else value for key, value in block["params"].items()}
    assert set(params) <= {*SCHEDULERS[block["type"]].parameters, "last_batch_iteration"}
    sgd = torch.optim.SGD([torch.zeros(1)], lr=config.optimizer.learning_rate)
    scheduler = getattr(lr_schedules, block["type"])(sgd, **params)
    expected = []
    for _ in range(UPDATES):
        expected.append(sgd.param_groups[0]["lr"])
        scheduler.step()
    schedule = schedule_of(config, UPDATES)
    assert [schedule(update) for update in range(UPDATES)] == about(expected)
