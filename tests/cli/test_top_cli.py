"""megalite top: the state of a run from its folder alone, on terminals of three widths, in pipes and as JSON."""

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import main
from megalite.cli.run_status import RunFolderReader
from megalite.launcher.control.failures import FailureFolder, FailureReport
from megalite.topology.axes import Layout
from tests.support.step_records import step_record
from tests.support.terminal import TerminalProgram
from tests.support.tiny_run import SETTINGS, write_token_files
from tests.support.waiting import PATIENCE, ROOT

TOTAL = 40


def line(step: int, **changes: Any) -> str:
    return json.dumps(step_record(step, **changes)) + "\n"


def write_run(folder: Path, steps: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(f"[training]\nsteps = {TOTAL}\n")
    if steps:
        (folder / "metrics.jsonl").write_text("".join(map(line, range(1, steps + 1))))
    return folder


def save(folder: Path, name: str) -> None:
    (folder / "checkpoints" / name).mkdir(parents=True)


def fail(folder: Path, seconds: float) -> None:
    """Leave the reports of two ranks, of which one only lost the other. seconds: from now on."""
    failures = FailureFolder(folder / "failures", Layout(), "job")
    place = {"coordinates": {}, "node": "n0", "pid": 1, "job": "job", "time": time.time() + seconds}
    failures.write(FailureReport(0, exception="", message="lost", secondary=True, **place))
    failures.write(FailureReport(1, exception="ValueError", message="too hot\nat the top", **place))


def aged(folder: Path, seconds: float) -> None:
    """Make all that a run has written older."""
    for path in [folder, *folder.rglob("*")]:
        changed = path.stat().st_mtime - seconds
        os.utime(path, (changed, changed))


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Hold the lock that a run holds."""
    with (folder / ".in-use").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def shown(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> str:
    assert main(["top", *map(str, arguments)]) == code
    output = capsys.readouterr()
    return output.err if code else output.out


@pytest.mark.parametrize("columns", [40, 80, 140])
def test_a_terminal_shows_the_run_as_it_goes_on_and_is_left_as_it_was(tmp_path: Path, columns: int) -> None:
    run = write_run(tmp_path / "run", 20)
    save(run, "step-000020")
    with TerminalProgram(["-m", "megalite", "top", str(run)], columns=columns) as program:
        screen = program.wait_for("Ctrl-C leaves")
        assert screen.is_alternate and max(len(text.rstrip()) for text in screen.lines) <= columns
        words = " ".join(str(screen).split())
        for text in (
            "running",
            "20/40",
            "50%",
            "0:10 left",
            "loss 2.1500",
            "MFU 64%",
            "checkpoint after step 20",
        ):
            assert text in words
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(line(21) + line(22)[:30])
            metrics.flush()
            program.wait_for("21/40")
            program.resize(60)
            metrics.write(line(22)[30:])
            metrics.flush()
            program.wait_for("22/40")
        code, screen = program.ended(signal.SIGINT)
    assert code == 0
    assert screen.cursor_is_shown and not screen.is_alternate and "22/40" in str(screen)


def test_sigterm_restores_the_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 20)
    with TerminalProgram(["-m", "megalite", "top", str(run)], columns=80) as program:
        program.wait_for("Ctrl-C leaves")
        code, screen = program.ended(signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert screen.cursor_is_shown and not screen.is_alternate


def test_a_pipe_gets_the_present_state_and_loads_no_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a run", 20)
    code = (
        "import sys; from megalite.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 3 * ('torch' in sys.modules or 'rich' in sys.modules and '--once' in sys.argv))"
    )
    before = sorted(path.name for path in run.rglob("*"))
    for flags in ([], ["--once"]):
        ended = subprocess.run(
            [sys.executable, "-c", code, "top", str(run), *flags],
            cwd=ROOT,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        assert b"loss 2.1500" in ended.stdout and b"\x1b" not in ended.stdout
    assert sorted(path.name for path in run.rglob("*")) == before


def test_a_program_reads_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "runs" / "a", 20)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(line(21, loss=None, validation_loss=2.5, validation_tokens=100))
    report = json.loads(shown(capsys, run, "--json"))
    assert (report["step"], report["total_steps"], report["usual_step_seconds"]) == (21, TOTAL, 0.5)
    assert report["last_validation"] == {"step": 21, "validation_loss": 2.5, "validation_tokens": 100}
    assert report["alarms"] == ["loss or gradient was not finite in step 21"]
    assert report["last_step"]["loss"] is None and report["checkpoint_step"] is None
    write_run(tmp_path / "runs" / "b", 0)
    reports = json.loads(shown(capsys, tmp_path / "runs", "--json"))["runs"]
    assert [Path(report["run"]).name for report in reports] == ["a", "b"]
    assert reports[1]["state"] == "preparing" and reports[1]["last_step"] is None


def test_several_runs_are_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/a"), 20)
    fail(write_run(Path("runs/b"), 10), seconds=0.0)
    head, first, second = shown(capsys).splitlines()
    assert head.split() == ["run", "state", "step", "left", "loss", "tokens/s"]
    assert first.split()[:8] == ["runs/a", "running", "20/40", "50%", "0:10", "2.1500", "2,000"]
    assert "failed" in second and "ValueError: too hot" in second


def state(run: Path) -> str:
    status = RunFolderReader(run).read()
    return "; ".join(filter(None, [status.state, status.detail, *status.alarms]))


def test_the_state_is_that_of_the_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0)
    assert state(run) == "preparing; no step yet; no process of this machine uses the folder"
    with in_use(run):
        assert state(run) == "preparing; no step yet"
        (run / "metrics.jsonl").write_text("".join(map(line, range(1, 11))))
        assert state(run) == "running"
        save(run, ".step-000010.partial-ab12")
        assert state(run) == "saving; step-000010"
        (run / "checkpoints" / ".step-000010.partial-ab12").rename(run / "checkpoints" / "step-000010")
        assert state(run) == "running"
    aged(run, 100)
    assert state(run) == "stopped; step 10 is saved, and the same command resumes there"
    with in_use(run):
        aged(run, 620)
        assert state(run) == "running; no record for 12 min, a step usually takes 0.5 s"
        (run / "run.toml").touch()
        assert state(run) == "preparing; no step yet"
        (run / "metrics.jsonl").write_text("".join(map(line, range(1, TOTAL + 1))))
        save(run, f"step-{TOTAL:06}")
        assert state(run) == "running; every step is saved; the export follows"
    assert state(run) == "ended"


def test_a_run_of_epochs_ends_with_the_last_step_that_its_start_recorded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0)
    (run / "run.toml").write_text("[training]\nepochs = 2\n")
    # The resumed run has larger batches.
    starts = {1: 20, 5: 12}
    lines = [line(step, **({"total_steps": starts[step]} if step in starts else {})) for step in range(1, 13)]
    (run / "metrics.jsonl").write_text("".join(lines[:10]))
    save(run, "step-000010")
    aged(run, 100)
    assert state(run).startswith("stopped")
    (run / "metrics.jsonl").write_text("".join(lines))
    save(run, "step-000012")
    assert state(run) == "ended"


def test_a_failure_has_its_first_cause_until_the_run_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 10)
    fail(run, seconds=0.0)
    assert state(run) == "failed; rank 1 on n0: ValueError: too hot"
    (run / "failures" / "rank-00009.json").write_text("{")
    fail(run, seconds=-3600.0)
    assert state(run) == "running"


def test_a_run_that_was_killed_says_for_how_long_it_is_quiet(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 10)

    assert state(run) == "running"
    aged(run, 7200)
    assert state(run) == (
        "running; no record for 2 h, a step usually takes 0.5 s; no process of this machine uses the folder"
    )


def test_a_reader_follows_a_file_that_is_written_and_cut_off(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 10)
    metrics, reader = run / "metrics.jsonl", RunFolderReader(run)
    reader.read()
    text = metrics.read_text()
    metrics.write_text(text + line(11)[:20])
    assert not reader.read().alarms and reader.history.step == 10
    metrics.write_text(text + line(11))
    reader.read()
    assert reader.history.step == 11
    # A resumed run goes back to its checkpoint, and may have written as many records when this program looks again.
    metrics.write_text("".join(line(step, loss=1.0) for step in range(1, 5)))
    reader.read()
    assert (reader.history.step, reader.history.last["loss"]) == (4, 1.0)
    metrics.write_text("".join(line(step, grad_norm=None) for step in range(1, 31)))
    reader.read()
    assert reader.history.step == 30 and reader.history.alarms == [
        "loss or gradient was not finite in steps 1 to 30"
    ]
    with metrics.open("a") as file:
        file.write(f'{{"st\n[]\n"text"\n{{"loss": 1}}\n{line(31)}')
    assert list(reader.read().alarms) == ["4 damaged lines in metrics.jsonl"] and reader.history.step == 31
    for path in sorted(run.rglob("*"), reverse=True):
        path.unlink()
    run.rmdir()
    assert reader.read().state == "gone"


def test_no_run_is_one_error_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remedy = "name the run.folder of a run, such as runs/default, or a folder of them"
    assert f"RUN: {tmp_path}/none is not a folder; {remedy}" in shown(capsys, tmp_path / "none", code=2)
    assert f"RUN: {tmp_path} has no run; {remedy}" in shown(capsys, tmp_path, code=2)


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_on_a_terminal_keeps_its_lines_and_ends_cleanly(tmp_path: Path, ranks: int) -> None:
    write_token_files(tmp_path)
    run = tmp_path / "run"
    settings = {
        **SETTINGS,
        "data.source": tmp_path / "train",
        "run.folder": run,
        "training.steps": 100_000,
        "parallel.data": ranks,
        "checkpoint.every": 5,
        "checkpoint.keep_last": 2,
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    with TerminalProgram(["-m", "megalite", "train", *flags], columns=80) as program:
        program.wait_for("saved step-000010")
        program.wait_for("tokens/s")
        assert state(run).startswith(("running", "saving"))
        code, screen = program.ended(signal.SIGINT)
    assert code == 130
    text = str(screen)
    assert screen.cursor_is_shown
    for kept in (
        "layout      tensor 1",
        "saved step-000005: training waited",
        "Ctrl-C: the run saves and ends",
    ):
        assert kept in text
    assert text.index("saved step-000005") < text.index("/100,000") < text.index("interrupted: ")


@pytest.mark.parametrize(
    "record",
    [
        pytest.param('{"step": 21, "loss": "high"}', id="text"),
        pytest.param('{"step": 21, "loss": 1e400}', id="an infinite number"),
        pytest.param('{"step": 1e400, "loss": 1.0}', id="an infinite step"),
        pytest.param('{"step": "21", "loss": 1.0}', id="a step in quotes"),
        pytest.param("[21]", id="no table"),
        pytest.param("[" * 100_000, id="nested without end"),
    ],
)
def test_a_line_that_is_no_record_is_counted_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: str
) -> None:
    run = write_run(tmp_path / "run", 20)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(f"{record}\n")
    text = shown(capsys, run, "--once")
    assert "20/40" in text and "1 damaged lines" in text


@pytest.mark.parametrize("content", ['[run]\nfolder = "run"\n', "training = 3\n", "[training]\nsteps = ", ""])
def test_a_half_written_run_file_leaves_the_last_step_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    run = write_run(tmp_path / "run", 20)
    (run / "run.toml").write_text(content)
    assert "step 20\n" in shown(capsys, run, "--once")


def test_a_terminal_without_utf8_shows_names_and_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [write_run(Path(name), 20) for name in ("k\xf6ln", "ulm")]
    failures = FailureFolder(runs[0] / "failures", Layout(), "job")
    now = {"coordinates": {}, "node": "n0", "pid": 1, "job": "job", "time": time.time() + 9}
    failures.write(FailureReport(0, exception="ValueError", message="hot \x1b[2J \u20ac", **now))
    for arguments in (runs, runs[:1]):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        assert main(["top", *map(str, arguments), "--once"]) == 0
        sys.stdout.flush()
        text = raw.getvalue().decode("ascii")
        assert "k?ln" in text and "hot" in text and "\x1b" not in text
