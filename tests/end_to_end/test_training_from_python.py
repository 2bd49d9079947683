"""Trainer(config).train(): validation, the best checkpoint and patience over resumes, callbacks, ranks of its own."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite import Callback, Trainer, load_config
from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.errors import ConfigError, TrainingError
from megalite.train import rank
from megalite.train.run import TrainingResult
from tests.support.jobs import ROOT, Job, curve, tensor_hashes, training_here
from tests.support.mlflow_stand_in import put_in_place
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.sink_readers import (
    csv_columns,
    mlflow_checkpoints,
    mlflow_curve,
    mlflow_run,
    tensorboard_curves,
    wait_for_wandb,
    wandb_checkpoints,
    wandb_curves,
    wandb_records,
)

VALIDATION = ("validation_loss", "validation_perplexity", "validation_tokens")


@pytest.fixture(autouse=True, scope="module")
def process_as_before() -> Iterator[None]:
    with training_here():
        yield


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, its tokens prepared; DeepSpeed has no part in it."""
    folder = tmp_path_factory.mktemp("run")
    run_file = Job.write(folder, tensor=1, pipeline=1).run_file
    text = run_file.read_text().replace("[deepspeed.zero_optimization]\nstage = 1\n", "")
    text = text.replace("warmup_steps = 2", "warmup_steps = 0")
    run_file.write_text(text + "\n[validation]\nevery = 2\n")
    prepared = train(run_file, folder / "prepared", data={"split": [0.8, 0.2]}, training={"steps": 3})
    tokens = {name: str(prepared.folder / "data" / name) for name in ("train", "validation")}
    tables = f'source = "{tokens["train"]}"\nvalidation = "{tokens["validation"]}"'
    text = run_file.read_text()
    run_file.write_text(text.replace(f'source = "{folder / "corpus.jsonl"}"', tables))
    vocabulary = f'path = "{prepared.folder / "tokenizer"}"'
    run_file.write_text(run_file.read_text().replace("vocab_size = 300", vocabulary))
    return run_file


def train(run_file: Path, folder: Path, *callbacks: Callback, **settings: Any) -> TrainingResult:
    settings["run"] = {"folder": str(folder), **settings.get("run", {})}
    return Trainer(load_config(run_file, **settings), callbacks=callbacks).train()


def validations(result: TrainingResult) -> list[tuple[Any, ...]]:
    return [
        (record["step"], *(record[name] for name in VALIDATION))
        for record in result.metrics
        if "validation_loss" in record
    ]


class Stop(Callback):
    """Ends the run after a step."""

    def __init__(self, step: int):
        self._step = step

    def on_step_end(self, run: Any, step: Any) -> Mapping[str, float]:
        if step.step == self._step:
            run.stop("enough")
        return {"half_loss": step.loss / 2}


def test_a_run_in_pieces_is_the_whole_one(run_file: Path, tmp_path: Path) -> None:
    """With validations, a best checkpoint and few kept; stopped within a period, and resumed."""
    checkpoint = {"every": 3, "best": True, "keep_last": 2}
    whole = train(run_file, tmp_path / "whole", checkpoint=checkpoint, validation={"at_start": True})
    stopped = train(
        run_file, tmp_path / "pieces", Stop(5), checkpoint=checkpoint, validation={"at_start": True}
    )
    assert [record["step"] for record in stopped.metrics] == [0, 1, 2, 3, 4, 5]
    assert stopped.metrics[3]["half_loss"] == stopped.metrics[3]["loss"] / 2
    resumed = train(run_file, tmp_path / "pieces", checkpoint=checkpoint, validation={"at_start": True})

    assert tensor_hashes(resumed.folder) == tensor_hashes(whole.folder)
    steps = {folder: [record for record in folder.metrics if record["step"]] for folder in (whole, resumed)}
    assert [record["loss"] for record in steps[resumed]] == [record["loss"] for record in steps[whole]]
    # The stop at step 5 has a validation of its own, as every end of a run.
    assert [each for each in validations(resumed) if each[0] != 5] == validations(whole)
    assert [each[0] for each in validations(whole)] == [0, 2, 4, 6, 8, 10, 12]
    lowest = min(validations(whole), key=lambda each: each[1])
    assert whole.best is not None and read_manifest(whole.best).trainer_state["best_loss"] == lowest[1]
    assert int(whole.best.name.removeprefix("step-")) == lowest[0]
    kept = sorted(path.name for path in (whole.folder / "checkpoints").glob("step-*"))
    assert len(kept) <= 3 and kept[-1] == "step-000012" and whole.best.name in kept


def test_checkpoints_may_lie_on_another_disk(run_file: Path, tmp_path: Path) -> None:
    """RUN/checkpoints is a link that was made before the run; it saves, keeps, deletes and resumes there."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    for folder in (run, disk):
        folder.mkdir()
    (run / "checkpoints").symlink_to(disk)
    settings = {"checkpoint": {"every": 1, "keep_last": 1}, "validation": {"every": None}}
    for steps in (2, 3):
        result = train(run_file, run, training={"steps": steps}, **settings)
    assert [record["step"] for record in result.metrics] == [1, 2, 3]
    # The one that the run went on from is kept too.
    assert sorted(path.name for path in disk.glob("step-*")) == ["step-000002", "step-000003"]
    assert (run / "checkpoints").is_symlink() and result.checkpoint == run / "checkpoints" / "step-000003"


def test_intervals_of_epochs_end_with_the_step_that_ends_them(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the run stopped in between, and no interval is a whole number of steps."""
    settings: dict[str, Any] = {"training": {"steps": None, "epochs": 1}}
    settings |= {"checkpoint": {"every": "0.5 epochs"}, "validation": {"every": "1/3 epochs", "samples": 1}}
    train(run_file, tmp_path / "run", Stop(1), **settings)
    resumed = train(run_file, tmp_path / "run", **settings)
    line = re.search(r"data: (\d+) sequences .*; (\d+) steps are", capsys.readouterr().out)
    assert line is not None
    samples, last = map(int, line.groups())
    batch = load_config(run_file, **settings).batch.global_batch_size
    assert samples % batch

    def ends(parts: int) -> list[int]:
        return [math.ceil(number * samples / parts / batch) for number in range(1, parts + 1)]

    assert [step for step, *_ in validations(resumed)] == [1, *ends(3)]
    kept = [int(path.name.removeprefix("step-")) for path in (resumed.folder / "checkpoints").glob("step-*")]
    assert sorted(kept) == [1, *ends(2)] and ends(2)[-1] == last


@pytest.mark.extended
@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_handed_to_torch(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tf32: bool
) -> None:
    handed: list[tuple[str, bool]] = []
    monkeypatch.setattr(rank, "set_tf32", lambda device, tf32: handed.append((device.type, tf32)))
    train(run_file, tmp_path / "run", training={"steps": 1, "tf32": tf32})
    assert handed == [("cpu", tf32)]


def test_ctrl_c_saves_and_raises(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class PressesCtrlC(Callback):
        def on_step_end(self, run: Any, step: Any) -> None:
            if step.step == 4:
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.2)  # the signal is noted in a thread

    with pytest.raises(KeyboardInterrupt):
        train(run_file, tmp_path / "run", PressesCtrlC(), checkpoint={"every": None})
    last = find_latest(tmp_path / "run" / "checkpoints")
    assert last is not None and last.name == "step-000004"
    said = capsys.readouterr().out
    assert "stopped after step 4: Ctrl-C" in said
    assert said.splitlines()[-1].startswith(f"interrupted: the last checkpoint is {last}; ")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_sink_goes_on_after_a_failure_without_doubles(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service also learns how each start ended, and gets the checkpoints."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    put_in_place(monkeypatch)
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_RUN_GROUP": "night"}.items():
        monkeypatch.setenv(name, value)
    settings: dict[str, Any] = {
        "training": {"steps": 6},
        "checkpoint": {"every": 2},
        "monitor": {
            "report_to": ["tensorboard", "wandb", "mlflow", "csv"],
            "project": "books",
            "log_checkpoints": True,
        },
    }
    run = tmp_path / "run"

    class Killed(Callback):
        def on_train_start(self, run: Any) -> None:
            self._left = 6

        def on_step_end(self, run: Any, step: Any) -> None:
            self._left -= 1
            if not self._left:
                raise RuntimeError("killed")

    with pytest.raises(TrainingError, match="killed"):
        train(run_file, run, Killed(), Stop(0), **settings)
    assert mlflow_run(run).info.status == "FAILED"
    result = train(run_file, run, Stop(0), **settings)
    wait_for_wandb(run, ended=2)
    drawn, services, table = tensorboard_curves(run), wandb_curves(run), csv_columns(run)
    for name, key in {
        "train/loss": "loss",
        "validation/loss": "validation_loss",
        "half_loss": "half_loss",
    }.items():
        written = [(record["step"], record[key]) for record in result.metrics if key in record]
        for points in (drawn[name], services[name], mlflow_curve(run, name), table[key]):
            assert [step for step, _ in points] == [step for step, _ in written], name
            values, expected = [[value for _, value in each] for each in (points, written)]
            assert_close(values, expected, rtol=FLOAT32_RTOL, what=name)
    assert mlflow_run(run).info.status == "FINISHED"
    assert mlflow_run(run).data.params["training.steps"] == "6"
    records = wandb_records(run)
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1, 0]
    named = [record.run for record in records if record.HasField("run")]
    assert {(one.run_id, one.project, one.run_group, one.display_name) for one in named} == {
        ((run / "wandb-run-id").read_text().strip(), "books", "night", "run")
    }
    saved = [path.name for path in sorted((run / "checkpoints").glob("step-*"))]
    # A killed start may lose what its client still had in memory.
    for uploaded in (wandb_checkpoints(run), mlflow_checkpoints(run)):
        assert set(uploaded) <= set(saved) and saved[-1] in uploaded


def test_training_is_the_same_without_validation(run_file: Path, tmp_path: Path) -> None:
    with_it = train(run_file, tmp_path / "with", training={"steps": 4}, optimizer={"decay_steps": 12})
    without = train(
        run_file,
        tmp_path / "without",
        training={"steps": 4},
        optimizer={"decay_steps": 12},
        data={"validation": None},
        validation={"every": None},
    )
    assert validations(with_it) and not validations(without)
    assert curve(with_it.folder) == curve(without.folder)
    assert tensor_hashes(with_it.folder) == tensor_hashes(without.folder)


def test_patience_ends_the_run_and_a_resume_knows_it(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "optimizer": {"learning_rate": 0.5, "warmup_steps": 0, "schedule": "constant"},
        "validation": {"every": 1, "patience": 2, "minimum_improvement": 20.0},
        "checkpoint": {"export": "best", "best": True},
    }
    result = train(run_file, tmp_path / "run", **settings)
    # No loss can be lower by 20 than the first, so the second and the third are the two in a row.
    assert [record["step"] for record in result.metrics] == [1, 2, 3]
    told = "stopped after step 3: the validation loss has not improved by 20 or more 2 times in a row"
    assert told in capsys.readouterr().out
    assert (result.export / "model.safetensors").is_file()
    again = train(run_file, tmp_path / "run", **settings)
    assert len(again.metrics) == 3 and told in capsys.readouterr().out
    settings["validation"]["patience"] = 4
    assert len(train(run_file, tmp_path / "run", **settings).metrics) == 5


def test_a_callback_that_raises_ends_the_run_and_another_can_follow(run_file: Path, tmp_path: Path) -> None:
    class Broken(Callback):
        def on_validation_end(self, run: Any, validation: Any) -> None:
            raise KeyError("no such metric")

    with pytest.raises(
        TrainingError, match=r"Broken\.on_validation_end raised KeyError: 'no such metric' \(.*:\d+"
    ):
        train(run_file, tmp_path / "run", Broken())
    assert len(train(run_file, tmp_path / "run", training={"steps": 2}).metrics) == 2


def test_what_a_call_sets_is_checked_like_the_file(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.micro_batchsize: unknown key; did you mean") as raised:
        load_config(run_file, training={"micro_batchsize": 1}, model={"family": "lama"})
    assert len(raised.value.problems) == 2
    with pytest.raises(
        ConfigError, match=r"steps: is 5, but should be a section; write steps=\{.key.: value\}"
    ):
        load_config(run_file, steps=5)
    config = load_config(run_file, **{"training.steps": None, "training": {"epochs": 1}})
    assert (config.training.steps, config.training.epochs) == (None, 1.0)


def test_a_rank_of_a_launcher_resolves_the_layout_by_it(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = load_config(run_file)
    told = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29500}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert load_config(run_file, parallel={"data": "auto"}).layout.data == 2
    with pytest.raises(
        ConfigError,
        match=r"the layout has 1 rank, not the 2 ranks that the environment names \(WORLD_SIZE = 2\)",
    ):
        Trainer(alone).train()


SCRIPT = """
import json, sys
from megalite import Callback, RunConfig, Trainer, load_config
from megalite.errors import LaunchError, RankFailure

LATE = {"parallel": {"data": 2}, "training": {"threads": 2}}

class OnRankOne(Callback):
    def __init__(self, error):
        self.error = error
    def on_step_end(self, run, report):
        if run.rank == 1 and report.step == 2:
            if self.error:
                raise self.error
            run.stop("rank 1 has seen enough")

def train(folder, *callbacks):
    config = load_config(sys.argv[1], run={"folder": folder}, parallel={"data": 2})
    return Trainer(config, callbacks=callbacks).train()

told = {"torch": "torch" in sys.modules}
told["forked"] = [each["loss"] for each in train(sys.argv[2] + "/stopped", OnRankOne(None)).metrics]
try:
    train(sys.argv[2] + "/failed", OnRankOne(ConnectionRefusedError("the dashboard is down")))
except RankFailure as failure:
    told["failure"] = str(failure)
import torch
torch.set_num_threads(2)
torch.rand(2000, 2000) @ torch.rand(2000, 2000)
torch.rand(4000, 4000).exp().sum()
config = load_config(sys.argv[1], run={"folder": sys.argv[2] + "/late"}, **LATE)
try:
    Trainer(config, callbacks=[OnRankOne(None)]).train()
except LaunchError as failure:
    told["refused"] = str(failure)
told["spawned"] = [each["loss"] for each in Trainer(config).train().metrics]
print(json.dumps(told))
"""


def run_python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """A Python process of its own, which has to end well."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran


@pytest.mark.extended
def test_a_script_starts_ranks_and_hears_of_what_any_of_them_does(run_file: Path, tmp_path: Path) -> None:
    ran = run_python("-c", SCRIPT, str(run_file), str(tmp_path))
    told = json.loads(ran.stdout.splitlines()[-1])
    assert not told["torch"], "RunConfig and Trainer load torch before they need it"
    assert len(told["forked"]) == 2
    assert "stopped after step 2: rank 1 has seen enough" in ran.stdout
    failure = "rank 1 (pp 0, dp 1, tp 0)"
    assert told["failure"].startswith(failure), told["failure"]
    assert "OnRankOne.on_step_end raised ConnectionRefusedError: the dashboard is down" in told["failure"]
    assert "a new process cannot import the callback OnRankOne" in told["refused"]
    assert "use torchrun --nproc-per-node 2" in told["refused"]
    assert len(told["spawned"]) > 2
    assert_close(told["spawned"][:2], told["forked"], rtol=FLOAT32_RTOL, what="losses of spawned ranks")


def test_the_example_trains_by_its_own_words(tmp_path: Path) -> None:
    ran = run_python(
        "examples/python/train.py", "--run.folder", str(tmp_path / "run"), "--training.steps", "24"
    )
    records = TrainingResult(tmp_path / "run").metrics
    assert records[0]["validation_loss"] > 6.5 > 6.2 > records[-1]["validation_loss"]
    assert records[-1]["weight_norm"] > 0
    assert ran.stdout.splitlines()[-1].startswith("validation loss ")


def test_ids_alone_train_and_export_without_a_tokenizer(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A .bin/.idx pair as Megatron-LM leaves it: the losses are those of the same ids with their tokenizer."""
    prepared = load_config(run_file).data.source
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prepared}{suffix}", tmp_path / f"ids{suffix}")
    with_tokenizer = train(run_file, tmp_path / "with", training={"steps": 3})
    text = re.sub(r'^(path|validation) = ".*"\n', "", run_file.read_text(), flags=re.M)
    text = text.replace(f'"{prepared}"', f'"{tmp_path / "ids"}"').replace(
        'vocab_size = "auto"', "vocab_size = 300"
    )
    (tmp_path / "run.toml").write_text(text.replace("every = 2\n", ""))
    alone = train(
        tmp_path / "run.toml", tmp_path / "alone", training={"steps": 3}, checkpoint={"export": True}
    )
    losses = [
        [record["loss"] for record in run.metrics if "loss" in record] for run in (with_tokenizer, alone)
    ]
    assert losses[0] == losses[1]
    assert (alone.export / "model.safetensors").is_file() and not (alone.export / "tokenizer.json").exists()
    output = capsys.readouterr().out
    assert "has no tokenizer, because the training data has none" in output
    assert output.count("next: megalite generate") == 1  # of the run with a tokenizer


class Limits(Callback):
    """Records the shortest and the longest time limit of this rank's process groups."""

    def on_step_end(self, run: Any, step: Any) -> Mapping[str, float]:
        groups = torch.distributed.distributed_c10d._world.pg_map
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        seconds = [backend.options._timeout.total_seconds() for backend in backends]
        return {"groups": len(seconds), "shortest": min(seconds), "longest": max(seconds)}


@pytest.mark.extended
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_group_of_a_run_waits_as_long_as_the_setting_says(
    run_file: Path, tmp_path: Path, stage: int
) -> None:
    """Those that DeepSpeed makes too."""
    engine = {"deepspeed": {"zero_optimization": {"stage": stage}}} if stage else {}
    result = train(
        run_file,
        tmp_path / "run",
        Limits(),
        launch={"collective_seconds": 77},
        parallel={"data": 2},
        training={"steps": 1},
        **engine,
    )
    seen = [
        (record["groups"], record["shortest"], record["longest"])
        for record in result.metrics
        if "groups" in record
    ]
    assert len(seen) == 1 and seen[0][0] >= 2 and seen[0][1:] == (77, 77)
