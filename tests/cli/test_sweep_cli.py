"""megalite sweep: real sweeps with a failure and with signals, and all that is said without a training."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megalite.checkpoint.folder import find_latest
from megalite.cli import main
from tests.support.jobs import ROOT
from tests.support.studies import write_finished, write_study
from tests.support.waiting import PATIENCE, wait_until

RATE = "optimizer.learning_rate"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_study(tmp_path)


def record_of(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "sweep.json").read_text())
    return {run["name"]: run for run in record["runs"]}


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["sweep", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_a_failed_run_does_not_end_the_sweep_and_a_finished_one_is_not_run_again(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = ["sweep", str(run_file), "--over", f"{RATE}=1e30,1e-2"]
    assert main(rates) == 1
    shown = capsys.readouterr().out
    folder = run_file.parent / "runs" / "tiny-sweep"
    runs = record_of(folder)
    good, bad = runs["learning_rate=1e-2"], runs["learning_rate=1e30"]
    assert (good["state"], good["steps"], bad["state"]) == ("finished", 6, "failed")
    records = [
        json.loads(line) for line in (folder / good["name"] / "metrics.jsonl").read_text().splitlines()
    ]
    assert good["loss"] == records[-1]["validation_loss"] and good["processor_seconds"] > 0
    assert "gradient" in bad["cause"] and bad["cause"] in shown and "by validation loss" in shown
    rows = list(csv.DictReader((folder / "sweep.csv").open()))
    assert [row[RATE] for row in rows] == ["1e-2", "1e30"] and float(rows[0]["loss"]) == good["loss"]

    before = (folder / good["name"] / "metrics.jsonl").stat()
    assert main(["sweep", str(run_file), "--over", f"{RATE}=1e-2"]) == 0
    assert "1 run of 1 finished already" in capsys.readouterr().out
    assert (folder / good["name"] / "metrics.jsonl").stat() == before

    changed = refused(capsys, run_file, "--over", f"{RATE}=1e-2", "--training.steps", "7")
    assert "has learning_rate=1e-2 with other settings or another text" in changed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_all_runs_which_save_and_resume(run_file: Path, number: int, code: int) -> None:
    folder = run_file.parent / "runs" / "tiny-sweep"
    names = [f"seed={seed}" for seed in (1, 2)]
    command = [
        sys.executable,
        "-m",
        "megalite",
        "sweep",
        str(run_file),
        "--over",
        "run.seed=1,2",
        "--jobs",
        "2",
    ]

    def interrupted(after: Callable[[Path], bool]) -> str:
        with subprocess.Popen(
            [*command, "--training.steps", "1000000"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            every = lambda: all(after(folder / name) for name in names)  # noqa: E731
            wait_until(every, "no step", process=process)
            process.send_signal(number)
            output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, output
        return output

    def has_steps(run_folder: Path) -> bool:
        metrics = run_folder / "metrics.jsonl"
        return metrics.exists() and metrics.read_text().count("\n") > 2

    output = interrupted(has_steps)
    assert "the same command goes on" in output
    assert {run["state"] for run in record_of(folder).values()} == {"stopped"}
    saved = {}
    for name in names:
        checkpoint = find_latest(folder / name / "checkpoints")
        assert checkpoint is not None
        saved[name] = int(checkpoint.name.removeprefix("step-"))
    if number == signal.SIGTERM:
        lines = {name: (folder / name / "metrics.jsonl").read_text().count("\n") for name in names}
        assert lines == saved
        interrupted(lambda each: (each / "metrics.jsonl").read_text().count("\n") > saved[each.name])
        assert all("resum" in (folder / f"{name}.log").read_text() for name in names)


def test_all_problems_of_all_runs_are_said_before_the_first_starts(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["--over", f"{RATE}=-1,1e-2", "--over", "training.micro_batch_size=2,many", "--model.layers", "3"]
    said = refused(capsys, run_file, *sweep)
    assert "has 3 problems" in said and "\n  model.layers: unknown key" in said
    assert "learning_rate=-1,micro_batch_size=2: optimizer.learning_rate: -1" in said
    assert 'training.micro_batch_size: "many"' in said
    assert not (run_file.parent / "runs").exists()


def test_a_study_whose_folder_cannot_be_written_goes_to_no_other(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run_file.parent)
    folder = f"{run_file}/study"
    said = refused(capsys, run_file, "--over", f"{RATE}=1e-3,1e-2", "--run.folder", folder, "--slurm")
    assert f'run.folder: "{folder}" cannot be written: {run_file} is a file' in said
    assert not (run_file.parent / "runs").exists()


def test_the_array_script_trains_the_run_of_its_task(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = run_file.rename(tmp_path / r"the run\1's.toml")
    sweep = [str(run_file), "--over", f"{RATE}=1e-3,1e-2", "--over", "data.shuffle=true,false"]
    write_finished(tmp_path / "runs" / "tiny-sweep" / "learning_rate=1e-3,shuffle=true", 6, 2.5)
    assert main(["sweep", *sweep, "--slurm", "--jobs", "2"]) == 0
    script = tmp_path / "runs" / "tiny-sweep" / "array.sbatch"
    assert f"next: sbatch {script}" in capsys.readouterr().out
    text = script.read_text()
    assert "#SBATCH --array=0-2%2\n" in text and "#SBATCH --ntasks-per-node=1" in text
    programs = tmp_path / "bin"
    programs.mkdir()
    srun = programs / "srun"
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$SAID"\n')
    srun.chmod(0o755)
    environ = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "SAID": str(tmp_path / "said")}
    for task, name in enumerate(["1e-3,shuffle=false", "1e-2,shuffle=true", "1e-2,shuffle=false"]):
        environ |= {"SLURM_JOB_ID": str(task), "SLURM_ARRAY_TASK_ID": str(task)}
        subprocess.run(["bash", str(script)], cwd=tmp_path, env=environ, check=True, timeout=PATIENCE)
        words = (tmp_path / "said").read_text().splitlines()
        assert words[words.index("train") + 1] == str(run_file)
        assert f"--run.folder={script.parent}/learning_rate={name}" in words
    monkeypatch.setenv("PATH", str(programs))
    assert main(["sweep", *sweep, "--submit"]) == 2
    assert "there is no sbatch on PATH" in capsys.readouterr().err
    monkeypatch.setenv("SAID", str(tmp_path / "submitted"))
    (programs / "sbatch").write_text('#!/bin/bash\necho "$@" > "$SAID"\n')
    (programs / "sbatch").chmod(0o755)
    assert main(["sweep", *sweep, "--submit"]) == 0
    assert (tmp_path / "submitted").read_text() == f"{script}\n"


def test_runs_that_a_batch_job_has_trained_are_compared(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"1e-4": 3.0, "1e-3": 2.0, "1e-2": 2.5}
    sweep = ["sweep", str(run_file), "--over", f"{RATE}={','.join([*losses, '1e-1'])}", "--report"]
    assert main(sweep) == 2
    assert "there is no" in capsys.readouterr().err
    folder = tmp_path / "runs" / "tiny-sweep"
    for value, loss in losses.items():
        write_finished(folder / f"learning_rate={value}", 6, loss)
    assert main([*sweep[:-1], "--slurm"]) == 0
    assert main(sweep) == 0
    table = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.endswith(("finished", "waiting"))
    ]
    assert [row[:2] for row in table] == [
        ["1e-3", "2.0000"],
        ["1e-2", "2.5000"],
        ["1e-4", "3.0000"],
        ["1e-1", "-"],
    ]
    root = ElementTree.fromstring((folder / "sweep.svg").read_text())
    places = {
        title.text.split("=")[1].split(":")[0]: (float(dot.attrib["cx"]), float(dot.attrib["cy"]))
        for dot in root.iter(f"{SVG}circle")
        if (title := dot.find(f"{SVG}title")) is not None and title.text
    }
    # The rates are a decade apart on a logarithmic axis, and a lower loss stands lower.
    gaps = [places["1e-3"][0] - places["1e-4"][0], places["1e-2"][0] - places["1e-3"][0]]
    assert gaps[0] > 10 and abs(gaps[0] - gaps[1]) < 0.2
    assert places["1e-3"][1] > places["1e-2"][1] > places["1e-4"][1]


def test_a_launcher_cannot_start_a_sweep_in_every_rank(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "call it once, without a launcher" in refused(capsys, run_file, "--over", f"{RATE}=1,2")
