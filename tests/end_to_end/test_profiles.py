"""A run that cannot write a profile or a trace trains on, and a resumed one makes those of a later step."""

import json
from pathlib import Path

import pytest
import torch

from megalite.cli import main
from megalite.launcher.control.progress import Activity
from megalite.planner.traces import read_step
from tests.support.jobs import training_here
from tests.support.tiny_run import SETTINGS, write_token_files


def train(*flags: str) -> int:
    Path("run.toml").write_text('[data]\nsource = "train"\n[run]\nfolder = "run"\n')
    settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
    with training_here():
        return main(["train", "run.toml", *settings, *flags])


def test_what_cannot_be_written_ends_no_run_and_a_later_step_of_the_resumed_run_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_token_files(tmp_path)
    Path("run").mkdir()
    folders = {"profile": Path("run/profiles"), "trace": Path("run/traces")}
    for folder in folders.values():
        folder.write_text("in the way")
    assert train("--training.steps=2", "--monitor.profile_steps=[1]", "--monitor.trace_steps=[1]") == 0
    said = capsys.readouterr().out
    for name, folder in folders.items():
        place = folder / "step-000001"
        assert f"warning: {name} of step 1, rank 0: {place} is not complete: Not a directory" in said
        folder.unlink()
    assert "traced step 1" not in said
    assert (
        train("--training.steps=4", "--monitor.profile_steps=[1, 4]", "--monitor.trace_steps=[1, 2, 4]") == 0
    )
    said = capsys.readouterr().out
    assert "resumed after step 2" in said and "differ from the checkpoint's: training.steps 2 -> 4" in said
    assert "profiled step 4: run/profiles/step-000004; " in said and "profiled step 1:" not in said
    assert "monitor.profile_steps: 1 came before this start, and left nothing" in said
    assert "monitor.trace_steps: 1, 2 came before this start, and left nothing" in said
    for folder in folders.values():
        assert [step.name for step in folder.iterdir()] == ["step-000004"]
    starts = [json.loads(line) for line in Path("run/starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 2]
    origins = [starts[1]["origins"].get(key) for key in ("training.steps", "data.source", "optimizer.eps")]
    assert origins == ["--training.steps", "run.toml", None]
    assert starts[1]["packages"]["torch"] == torch.__version__ and starts[1]["device"] == "cpu"
    # The profile has a phase of its own in the trace of its step, before the step and behind it.
    phases = [phase.name for phase in read_step(Path("run"), 4).facts.phases]
    assert phases.count(Activity.PROFILING.value) == 2 and len(phases) > 5
