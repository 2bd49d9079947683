"""A run records the norms of each layer and the loss of each epoch, resumes, and trains to the same weights."""

from pathlib import Path
from typing import Any

import pytest

from megalite.cli import main
from megalite.monitor.jsonl import read_metrics
from tests.support.jobs import training_here
from tests.support.parity import FLOAT32_RTOL, NARROW_FLOOR, about, assert_close
from tests.support.tiny_run import SETTINGS, write_token_files

GROUPS = '[{pattern = "*norm*", learning_rate_ratio = 0.5}]'
KINDS = ("grad_norm", "weight_norm", "update_ratio")
NAMES = [
    "embedding",
    *(f"layers.{layer}" for layer in range(4)),
    "final_norm",
    "head",
    "*norm*",
    "default",
    "model",
]


def train(folder: str, *flags: str) -> list[dict[str, Any]]:
    Path("run.toml").write_text(f'[data]\nsource = "train"\n[run]\nfolder = "{folder}"\n')
    settings = [f"--{name}={value}" for name, value in SETTINGS.items() if name != "training.steps"]
    with training_here():
        assert main(["train", "run.toml", *settings, f"--optimizer.groups={GROUPS}", *flags]) == 0
    return read_metrics(Path(folder) / "metrics.jsonl")


def test_chosen_steps_have_the_norms_and_the_weights_are_those_of_a_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_token_files(tmp_path)
    # 34 samples in batches of 4: the first epoch ends in step 9, the second in step 17.
    plain = train("plain", "--training.epochs=2")
    flags = ("--training.epochs=2", "--monitor.layers_every=4", "--checkpoint.every=11")
    train("recorded", *flags)
    recorded = train("recorded", *flags, "--checkpoint.resume=recorded/checkpoints/step-000011")
    assert [record["loss"] for record in recorded] == [record["loss"] for record in plain]
    names = {f"{kind}/{name}" for kind in KINDS for name in NAMES}
    for record in recorded:
        assert {name for name in record if "/" in name and not name.startswith("learning_rate")} == (
            names if record["step"] % 4 == 0 else set()
        )
        if record["step"] % 4 == 0:
            assert record["grad_norm/model"] == about(record["grad_norm"])
            assert all(record[f"update_ratio/{name}"] > 0 for name in NAMES)
    assert "epoch 1: mean loss" in capsys.readouterr().out
    ends = {record["step"]: record for record in recorded if "epoch" in record}
    assert {step: record["epoch"] for step, record in ends.items()} == {9: 1, 17: 2}
    losses = [record["loss"] for record in recorded]
    assert ends[9]["epoch_loss"] == about(sum(losses[:9]) / 9)
    assert ends[17]["epoch_loss"] == about(sum(losses[9:17]) / 8)


def test_norms_of_fp16_are_without_the_loss_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_token_files(tmp_path)
    flags = ("--training.precision=fp16", "--training.steps=2", "--monitor.layers_every=1")
    records = {
        scale: train(f"scale-{scale}", *flags, f"--training.loss_scale={scale}")[0] for scale in (256, 4096)
    }
    for scale, record in records.items():
        assert record["loss_scale"] == scale
        assert_close([record["grad_norm/model"]], [record["grad_norm"]], rtol=FLOAT32_RTOL, what="all")
    for name in NAMES:
        norms = [record[f"grad_norm/{name}"] for record in records.values()]
        # The scales are powers of two: the same digits, but for what is too small for fp16.
        assert norms[0] > 0
        assert_close(norms[:1], norms[1:], rtol=NARROW_FLOOR["fp16"], what=name)
