"""The settings of curriculum and length buckets that a run keeps when it goes on from a checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite import load_config
from megalite.config.schema import RunConfig
from megalite.errors import ConfigError
from megalite.train import changed
from tests.unit.config.runs import REMOVED
from tests.unit.config.runs import changed as changed_run

STEP, SIZE = 6, 8
BLEND = [
    {"source": "stdlib", "weight": 1.0, "pattern": "a*.py"},
    {"source": "stdlib", "weight": 3.0, "pattern": "b*.py"},
]
FIRST = {"step": 4, "weights": [1.0, 1.0]}


def run(curriculum: list[dict[str, Any]], blend: list[dict[str, Any]] = BLEND, size: int = SIZE) -> RunConfig:
    settings = changed_run(
        {
            "data.source": REMOVED,
            "data.blend": blend,
            "data.curriculum": curriculum,
            "training.global_batch_size": size,
            "training.steps": 20,
        }
    )
    return load_config(None, **settings)


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint after STEP steps of SIZE samples, whose weights changed at step 4."""
    manifest = SimpleNamespace(
        config=run([FIRST]).model_dump(mode="json"), trainer_state={"step": STEP, "samples": STEP * SIZE}
    )
    monkeypatch.setattr(changed, "read_manifest", lambda _: manifest)
    return Path("step-000006")


@pytest.mark.parametrize("later", [[], [{"step": 7, "weights": [0.0, 1.0]}]])
def test_weights_of_later_steps_may_change(checkpoint: Path, later: list[dict[str, Any]]) -> None:
    changed.require_same_order(run([FIRST, *later]), checkpoint)
    changed.require_same_order(run([FIRST, *later]), None)


@pytest.mark.parametrize(
    "other",
    [
        run([]),
        run([{"step": 5, "weights": [1.0, 1.0]}]),
        run([FIRST, {"step": 6, "weights": [0.0, 1.0]}]),
        run([FIRST], [{**BLEND[0], "weight": 2.0}, BLEND[1]]),
    ],
    ids=["removed", "moved", "added in the past", "other weights of the blend"],
)
def test_weights_of_earlier_steps_may_not(checkpoint: Path, other: RunConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"up to step 6 are not those of step-000006.*table of step 7 or later"
    ):
        changed.require_same_order(other, checkpoint)


def test_the_size_of_a_step_may_not(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"training.global_batch_size: 16 is not .* 48 sequences.*use 8"):
        changed.require_same_order(run([FIRST], size=16), checkpoint)


def bucketed(buckets: int, size: int = SIZE, length: int = 16) -> RunConfig:
    settings = changed_run(
        {
            "data.kind": "instruct",
            "data.packing": "none",
            "data.length_buckets": buckets,
            "training.global_batch_size": size,
            "training.sequence_length": length,
        }
    )
    return load_config(None, **settings)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (bucketed(0), "data.length_buckets: 0 is not that of step-000006, .*; use 4, or a new run.folder"),
        (bucketed(4, size=4), "training.global_batch_size: 4 is not .* data.length_buckets counts .* use 8"),
        (
            bucketed(4, length=32),
            "training.sequence_length: 32 is not that of .*; use 16, or a new run.folder",
        ),
    ],
    ids=["other buckets", "other size", "other length"],
)
def test_the_buckets_may_not_change(monkeypatch: pytest.MonkeyPatch, now: RunConfig, said: str) -> None:
    state = {"step": STEP, "samples": STEP * SIZE}
    manifest = SimpleNamespace(config=bucketed(4).model_dump(mode="json"), trainer_state=state)
    monkeypatch.setattr(changed, "read_manifest", lambda _: manifest)
    changed.require_same_order(bucketed(4), Path("step-000006"))
    with pytest.raises(ConfigError, match=said):
        changed.require_same_order(now, Path("step-000006"))
