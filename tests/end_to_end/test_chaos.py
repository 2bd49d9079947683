"""`megalite chaos`: a job goes through faults to the numbers of a calm run, and the report says what they cost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.launcher.process import descendants
from tests.support.jobs import ROOT, Job, running
from tests.support.parity import about
from tests.support.waiting import PATIENCE, soon, wait_until

# Without ZeRO, whose update writes over a weight that differs; two saves a second.
SETTINGS = ("--training.steps", "100000", "--checkpoint.every", "2")
WITH_CHECKS = ("--monitor.self_check_every", "5", "--monitor.hang_seconds", "1")


def chaos(folder: Path, *words: str, data: int = 2) -> "subprocess.Popen[str]":
    job = Job.write(folder, tensor=1, pipeline=1, data=data)
    text = job.run_file.read_text().replace("[deepspeed.zero_optimization]\nstage = 1\n", "")
    job.run_file.write_text(text)
    command = ["chaos", str(job.run_file), "--output", str(folder / "chaos"), *SETTINGS, *words]
    return subprocess.Popen(
        [sys.executable, "-m", "megalite", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def facts_of(folder: Path, process: "subprocess.Popen[str]", code: int = 0) -> dict[str, Any]:
    try:
        # Seven starts of a job and their steps: a minute on a quiet machine.
        output, _ = process.communicate(timeout=8 * PATIENCE)
    finally:
        process.kill()  # with the job, where it has not ended
    assert process.returncode == code, output
    facts: dict[str, Any] = json.loads((folder / "chaos" / "chaos.json").read_text())
    return facts


@pytest.mark.extended
def test_kills_and_a_flipped_bit_cost_steps_and_change_no_number(tmp_path: Path) -> None:
    """The second kill comes at once behind the first recovery; the damaged checkpoint is refused, and set aside."""
    words = ["--minutes", "0.05", "--at", "kill=0.1", "--at", "kill=0.2", "--at", "flip-checkpoint=0.3"]
    facts = facts_of(tmp_path, chaos(tmp_path, *words))
    assert facts["passed"] is True and facts["torn_loaded"] == []
    *kills, flip = facts["faults"]
    assert [kill["kind"] for kill in kills] == ["kill", "kill"]
    for kill in kills:
        assert kill["outcome"] == "recovered" and kill["named"] is True and kill["detect"] < soon(5)
        parts = [kill[name] for name in ("detect", "start", "load", "first_step")]
        assert sum(parts) == about(kill["seconds"]) and min(parts) >= 0
        assert 0 <= kill["lost_steps"] < 15
    assert (
        flip["outcome"] == "refused, with file and tensor named"
        and flip["by_hand"] is True
        and flip["lost_steps"] >= 2
    )
    assert flip["by_hand"] is True
    equality, goodput = facts["equality"], facts["goodput"]
    assert equality["bitwise"] is True and equality["different"] == "" and equality["checkpoint"] % 2 == 0
    assert equality["steps"] >= 10 and goodput["steps_made"] > goodput["steps_kept"] == equality["steps"]
    assert goodput["share"] == about(goodput["available"] * goodput["kept"] * goodput["efficiency"])
    assert (tmp_path / "chaos" / "chaos.svg").read_text().count("<g><title>") == 3


@pytest.mark.extended
def test_every_other_fault_is_got_over_and_the_smaller_layout_is_as_good(tmp_path: Path) -> None:
    kinds = ("stop", "preempt", "full-disk", "drop-link", "flip-parameter", "shrink")
    at = [word for place, kind in enumerate(kinds) for word in ("--at", f"{kind}={0.1 + place}")]
    facts = facts_of(tmp_path, chaos(tmp_path, "--minutes", "0.15", *at, *WITH_CHECKS))
    found = {fault["kind"]: fault for fault in facts["faults"]}
    assert facts["passed"] is True and list(found) == list(kinds)
    assert {fault["outcome"] for fault in found.values()} == {"recovered"}
    assert found["stop"]["named"] and "hangs: no rank has moved" in found["stop"]["cause"]
    assert "SIGTERM" in found["preempt"]["cause"] and found["preempt"]["lost_steps"] == 0
    assert "File too large" in (tmp_path / "chaos" / "disturbed.log").read_text()
    flip = found["flip-parameter"]
    assert f"the copies of {flip['detail']} differ" in flip["cause"]
    assert found["shrink"]["ranks"] == 1
    assert facts["equality"]["bitwise"] is False and facts["equality"]["different"] == ""


@pytest.mark.extended
def test_a_fault_that_never_came_because_the_job_was_over_is_no_success(tmp_path: Path) -> None:
    words = ["--training.steps", "8", "--minutes", "60", "--at", "kill=3000", "--no-calm"]
    facts = facts_of(tmp_path, chaos(tmp_path, *words), code=1)
    assert facts["passed"] is False and facts["faults"] == [] and facts["goodput"]["steps_kept"] == 8
    assert [(fault["kind"], fault["at"]) for fault in facts["left"]] == [("kill", 3000)]
    assert (
        "not done, because the job ended before: kill at 3000.0 s"
        in (tmp_path / "chaos" / "chaos.txt").read_text()
    )


def test_ctrl_c_ends_all_processes_and_still_reports(tmp_path: Path) -> None:
    process = chaos(tmp_path, "--kill-every", "500", "--minutes", "60")
    log = tmp_path / "chaos" / "disturbed.log"
    wait_until(lambda: log.exists() and "saved step-000006" in log.read_text(), "no step", process=process)
    started = descendants(process.pid)
    os.kill(process.pid, signal.SIGINT)
    facts = facts_of(tmp_path, process, code=130)
    assert facts["goodput"]["steps_kept"] >= 5 and facts["faults"] == [] and facts["equality"] is None
    assert not running(started)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--minutes", "1"], "--kill-every: no fault was asked for"),
        (["--flip-bit", "parameter"], "monitor.self_check_every: is 0"),
        (["--slow", "7:2"], "--slow: the run has no rank 7"),
        (["--slow", "0:0.5"], "'0.5' times slower is not slower; use 2"),
        (["--at", "slow=5"], "'slow' is no fault; use one of kill, stop"),
        (
            ["--kill-every", "60", "--minutes", "1"],
            "--kill-every: no kill every 60 s comes within --minutes 1",
        ),
        (["--at", "kill=90", "--minutes", "1"], "--at: 90 s is not within --minutes 1"),
        (["--at", "kil=9"], "use one of kill, stop"),
        (["--stop", "1", "--monitor.on_hang", "report"], 'monitor.on_hang: is "report"'),
    ],
)
def test_faults_that_cannot_be_done_are_refused(
    tmp_path: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from megalite.cli import main

    job = Job.write(tmp_path, tensor=1, pipeline=1, data=2)
    arguments = ["chaos", str(job.run_file), "--output", str(tmp_path / "chaos"), *words]
    try:
        code = main(arguments)
    except SystemExit as left:
        code = int(left.code or 0)
    assert code == 2 and told in capsys.readouterr().err
    assert not (tmp_path / "chaos").exists()


@pytest.mark.parametrize("option", ["--stop=1", "--drop-link=1", "--shrink=1", "--at=stop=5"])
def test_a_fault_that_needs_two_ranks_is_refused_by_its_own_name(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from megalite.cli import main

    job = Job.write(tmp_path, tensor=1, pipeline=1, data=1)
    assert main(["chaos", str(job.run_file), "--output", str(tmp_path / "chaos"), option]) == 2
    message = capsys.readouterr().err
    assert "has 1 problem\n" in message and f"{option.split('=')[0]}: the run has one rank" in message
    assert "use --parallel.data 2" in message


@pytest.mark.parametrize(
    ("output", "rule"),
    [
        ("full", "is not empty"),
        ("full/file", "cannot be made (File exists)"),
        ("full/file/new", "Not a directory"),
    ],
)
def test_a_place_for_the_report_that_cannot_be_used_is_an_error(
    tmp_path: Path, output: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from megalite.cli import main

    job = Job.write(tmp_path, tensor=1, pipeline=1, data=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    code = main(["chaos", str(job.run_file), "--output", str(tmp_path / output), "--kill-every", "9"])
    message = capsys.readouterr().err
    assert code == 2 and f"--output: {tmp_path / output}" in message and rule in message
