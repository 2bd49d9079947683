"""Runs on Megatron's samples: the same losses in every layout and behind every checkpoint, and what is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite import Trainer, load_config
from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError, DataError
from megalite.train.validation import HeldOutSet
from tests.support.jobs import training_here
from tests.support.megatron_core_samples import DataSet
from tests.support.parity import LAYOUT_RTOL, assert_close
from tests.support.tiny_run import SETTINGS, VOCABULARY

STEPS = 9
SETS = (DataSet("web", 90, 0, 23, vocabulary=VOCABULARY), DataSet("code", 40, 1, 40, "int32", VOCABULARY))
BLEND = [{"source": "web", "weight": 0.3}, {"source": "code", "weight": 0.7}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data sets, and a run of nine steps in one process, `whole`, with checkpoints after steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("megatron")
    for data_set in SETS:
        data_set.write(folder)
    with pytest.MonkeyPatch.context() as patch, training_here():
        patch.chdir(folder)
        Trainer(ordered("whole")).train()
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def ordered(run: str, **changes: Any) -> RunConfig:
    settings = {
        **SETTINGS,
        "training.steps": STEPS,
        "run.folder": run,
        "data.blend": BLEND,
        "data.order": "megatron",
        "data.split": [80, 20, 0],
        "validation.every": 4,
        "validation.samples": 8,
        "checkpoint.every": 3,
        "checkpoint.export": False,
        **changes,
    }
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return load_config(None, **sections)


def losses(run: str) -> dict[tuple[str, int], float]:
    """Return every number of a run that depends on its samples, by its name and its step."""
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "tokens", "validation_loss")
    return {(name, record["step"]): record[name] for record in records for name in names if name in record}


@pytest.mark.parametrize(
    ("step", "layout"),
    [
        (3, {"parallel.data": 2, "training.micro_batch_size": 2}),
        pytest.param(6, {"parallel.tensor": 2, "parallel.pipeline": 2}, marks=pytest.mark.extended),
    ],
    ids=["data 2", "tensor 2 x pipeline 2"],
)
def test_a_layout_goes_on_with_the_samples_that_another_has_not_seen(
    step: int, layout: dict[str, int]
) -> None:
    run = f"behind-{step}"
    Trainer(ordered(run, **layout, **{"checkpoint.resume": f"whole/checkpoints/step-{step:06}"})).train()
    whole = {key: value for key, value in losses("whole").items() if key[1] > step}
    parts = losses(run)
    assert parts.keys() == whole.keys() and ("validation_loss", 8) in parts and ("loss", STEPS) in parts
    assert_close(list(parts.values()), [whole[key] for key in parts], rtol=LAYOUT_RTOL)


@pytest.mark.extended
def test_each_validation_has_the_next_samples() -> None:
    """The weights stay, so the losses of two validations differ by their samples alone."""
    still = {"optimizer.learning_rate": 1e-12, "training.steps": 8}
    with training_here():
        Trainer(ordered("still", **still)).train()
    first, second = (losses("still")["validation_loss", step] for step in (4, 8))
    assert abs(first - second) > LAYOUT_RTOL * first


@pytest.mark.extended
def test_a_run_validates_on_a_file_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"data.blend": None, "data.source": "web", "data.split": None, "data.validation": "code"}
    with training_here():
        Trainer(ordered("named", **changes)).train()
    said = capsys.readouterr().out
    assert "samples in Megatron's order (data.order)" in said and "validation on 8 sequences" in said
    assert ("validation_loss", 4) in losses("named")


@pytest.mark.parametrize(
    ("step", "first"), [(0, 0), (1, 0), (4, 0), (5, 8), (8, 8), (9, 16)], ids=lambda number: str(number)
)
def test_a_validation_starts_behind_the_samples_of_earlier_ones(step: int, first: int) -> None:
    """As Megatron, which validates every 4 steps and once more behind the last one."""
    loader = SimpleNamespace(global_batch_size=4)
    assert HeldOutSet(loader, 8, every=4).first_sample(step) == first  # type: ignore[arg-type]
    assert HeldOutSet(loader, 8).first_sample(step) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"training.steps": 12},
            "training.steps: 12 is not 9, .*Megatron's order of the samples depends on it",
        ),
        ({"training.global_batch_size": 8}, "training.global_batch_size: 8 is not 4"),
        ({"run.seed": 5}, "run.seed: 5 is not 1234"),
        ({"data.split": [90, 10, 0]}, r"data.split: \[90.0, 10.0, 0.0\] is not \[80.0,"),
        ({"data.order": "megalite", "data.split": [0.8, 0.2]}, "data.order: megalite is not megatron"),
        (
            {"data.blend": [BLEND[0], {**BLEND[1], "weight": 0.8}]},
            "data.blend: the weights up to step 9 are not",
        ),
    ],
    ids=["steps", "batch", "seed", "split", "order", "weights"],
)
def test_a_run_whose_samples_would_be_others_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said), training_here():
        Trainer(ordered("whole", **changes)).train()


def test_text_has_no_such_order(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        DataError, match=r'blend\[1\].source: data.order = "megatron" orders .bin/.idx files, and'
    ):
        Trainer(
            ordered("text", **{"data.blend": [{"source": str(tmp_path / "a.txt"), "weight": 1.0}]})
        ).train()


def test_a_damaged_file_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        shutil.copy(f"web.{suffix}", tmp_path / f"x.{suffix}")
    index = (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.idx").write_bytes(index[:-8] + (2**60).to_bytes(8, "little"))
    blend = [{"source": str(tmp_path / "x"), "weight": 1.0}]
    with pytest.raises(DataError, match=r"x\.idx: documents do not cover the sequences"):
        Trainer(ordered("damaged", **{"data.blend": blend})).train()
    assert not list(Path("damaged").glob("checkpoints/*"))
