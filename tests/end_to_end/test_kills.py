"""A job that is killed, wherever it stands, goes on from its last checkpoint as if nothing had happened."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.folder import find_latest
from megalite.launcher.process import descendants, forked_ranks, is_stopped
from megalite.verify.chaos.inject import flip_checkpoint_bit
from tests.support.jobs import ROOT, Job, curve, running, tensor_hashes
from tests.support.waiting import PATIENCE, soon, wait_until

AGAIN = "the same command, or a requeue of the job, resumes from it"


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    return Job.write(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    job.run(folder)
    assert len(curve(folder)) == 12
    return folder


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _recorded_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_one_rank_killed_ends_the_job_in_time_and_names_the_rank(job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = job.start(folder)
    wait_until(lambda: _recorded_steps(folder) >= 4, "the job made no four steps", process=process)
    ranks = forked_ranks(process.pid)
    assert len(ranks) == 4
    os.kill(ranks[2], signal.SIGKILL)
    killed_at = time.monotonic()
    output, _ = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - killed_at < soon(10)
    assert process.returncode == 1
    # Only what a user needs: torch prints no schedule, and the first cause comes last.
    ending = output[output.rindex("step ") :]
    assert "chedule" not in ending and len(ending.splitlines()) < 12, output
    last = output[output.rindex("error:") :]
    assert re.search(r"rank 2 \(pp 1, dp 0, tp 0\).*killed by signal 9", last), output
    assert re.search(r"\n  after step \d+: [a-z ]+, last collective: [a-z_]+ over \w+\n", last), output
    assert last.endswith("\n  3 other ranks stopped because of it\n")
    assert not running(ranks)

    job.run(folder)
    assert curve(folder) == curve(undisturbed)
    assert tensor_hashes(folder) == tensor_hashes(undisturbed)


def test_ranks_that_start_again_from_copies_in_memory_lose_one_step_at_most(job, undisturbed, tmp_path):
    """There is no checkpoint to read before the end of the run."""
    folder, every_step = tmp_path / "run", ("--checkpoint.in_memory_every", "1", "--checkpoint.every", "100")
    process = job.start(folder, *every_step, "--launch.restarts", "1")
    wait_until(lambda: _recorded_steps(folder) >= 4, "the job made no four steps", process=process)
    ranks = forked_ranks(process.pid)
    os.kill(ranks[2], signal.SIGKILL)
    wait_until(lambda: not running(ranks), "the other ranks go on")
    done = _recorded_steps(folder)
    assert find_latest(folder / "checkpoints") is None and done < 12
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    assert "restart 1 of 1 in 1 s, from the beginning or a newer copy in memory, after: rank 2 (" in output
    [found] = re.findall(r"resumed after step (\d+) from the copy in memory, (/dev/shm/\S+);", output)
    assert int(found[0]) >= done - 1
    start = json.loads((folder / "starts.jsonl").read_text().splitlines()[-1])
    assert (start["step"], start["resumed_from"]) == (int(found[0]), found[1])
    assert curve(folder) == curve(undisturbed)
    assert tensor_hashes(folder) == tensor_hashes(undisturbed)
    assert not Path(found[1]).parent.exists()
    assert all(each["memory_copy_seconds"] > 0 for each in _records(folder)[int(found[0]) + 2 :])


def test_a_rank_alone_that_launch_started_goes_on_from_its_copy_in_memory(tmp_path):
    """The run began anew and has no checkpoint: checkpoint.resume = "never" does not hide the copy."""
    job, whole, folder = Job.write(tmp_path, tensor=1, pipeline=1), tmp_path / "whole", tmp_path / "run"
    flags = ("--training.steps", "100", "--checkpoint.every", "1000", "--checkpoint.in_memory_every", "1")
    flags += ("--checkpoint.resume", "never")
    job.run(whole, *flags)
    process = job.start(folder, *flags, "--local", "--restarts", "1", name="launch")
    wait_until(lambda: _recorded_steps(folder) >= 4, "the job made no four steps", process=process)
    train = descendants(process.pid)[0]
    [rank] = forked_ranks(train)
    os.kill(rank, signal.SIGKILL)
    wait_until(
        lambda: forked_ranks(train) not in ([], [rank]), "the rank does not start again", process=process
    )
    steps = _recorded_steps(folder)
    wait_until(lambda: _recorded_steps(folder) > steps, "the second start makes no step", process=process)
    # The process that forks ranks is killed too: megalite launch starts it again.
    os.kill(train, signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    for cause in ("rank 0 (", "local: megalite train was killed by signal 9 (SIGKILL)"):
        again = f"restart 1 of 1 in 1 s, from the beginning or a newer copy in memory, after: {cause}"
        assert again in output, output
    assert re.search(r"resumed after step \d+ from the copy in memory", output), output
    assert curve(folder) == curve(whole)
    assert tensor_hashes(folder) == tensor_hashes(whole)


@pytest.mark.extended
@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_job_that_was_told_to_end_is_not_started_again(tmp_path, command):
    """A batch system kills what does not end in time."""
    job, folder = Job.write(tmp_path, tensor=1, pipeline=1), tmp_path / "run"
    restarts = ("--launch.restarts", "1") if command == "train" else ("--local", "--restarts", "1")
    process = job.start(folder, "--training.steps", "100000", *restarts, name=command)
    wait_until(lambda: _recorded_steps(folder) >= 4, "the job made no four steps", process=process)
    victim = descendants(process.pid)[0]  # the rank of train, or train of launch
    os.kill(victim, signal.SIGSTOP)
    if command == "train":  # a rank that is stopped would go on to save
        os.kill(process.pid, signal.SIGSTOP)
    process.terminate()
    os.kill(victim, signal.SIGKILL)
    os.kill(process.pid, signal.SIGCONT)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode not in (0, 75) and "restart" not in output, output
    assert len((folder / "starts.jsonl").read_text().splitlines()) == 1


@pytest.mark.extended
def test_a_job_that_hangs_after_it_was_told_to_end_is_not_started_again(tmp_path):
    job, folder = Job.write(tmp_path, tensor=2, pipeline=1), tmp_path / "run"
    flags = ("--training.steps", "100000", "--launch.restarts", "1", "--monitor.hang_seconds", "1")
    process = job.start(folder, *flags)
    wait_until(lambda: _recorded_steps(folder) >= 4, "the job made no four steps", process=process)
    os.kill(forked_ranks(process.pid)[1], signal.SIGSTOP)
    process.terminate()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and " hangs: " in output and "restart" not in output, output


@pytest.mark.extended
def test_everything_killed_at_random_moments_and_during_saves(job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    chance = random.Random(os.environ.get("MEGALITE_TEST_SEED", "kills"))

    def a_save_is_under_way(started) -> bool:
        return any((folder / "checkpoints").glob(".step-*.partial-*")) or started.poll() is not None

    def some_steps_more(started) -> bool:
        return _recorded_steps(folder) >= steps or started.poll() is not None

    for ready in (a_save_is_under_way, some_steps_more):
        steps = _recorded_steps(folder) + chance.randint(1, 4)
        process = job.start(folder)
        wait_until(partial(ready, process), f"not so far: {ready.__name__}")
        time.sleep(chance.uniform(0, 0.05))
        ranks = descendants(process.pid)
        process.kill()
        process.communicate()
        # Nobody is left to end the ranks: they notice by themselves.
        wait_until(lambda ranks=ranks: not running(ranks), "ranks outlive the job", soon(10))
    job.run(folder)
    assert curve(folder) == curve(undisturbed)
    assert tensor_hashes(folder) == tensor_hashes(undisturbed)


@pytest.mark.extended
def test_the_same_command_again_has_nothing_left_to_do(job, undisturbed):
    before = curve(undisturbed)
    output = job.run(undisturbed)
    assert "resumed after step 12" in output
    assert "nothing left to train: this run has 12 steps" in output
    assert curve(undisturbed) == before


@pytest.mark.parametrize(
    ("ranks", "restarts", "number", "code"),
    [
        pytest.param(1, 0, signal.SIGTERM, 75, marks=pytest.mark.slow),  # two ranks do what one does
        (2, 0, signal.SIGTERM, 75),
        (2, 0, signal.SIGUSR1, 75),
        pytest.param(1, 0, signal.SIGINT, 130, marks=pytest.mark.slow),
        (2, 0, signal.SIGINT, 130),
        # In a process of its own, too, the rank is told once, and its end is no failure to start again after.
        (1, 1, signal.SIGTERM, 75),
        (1, 1, signal.SIGINT, 130),
    ],
)
@pytest.mark.extended
def test_an_interrupted_run_saves_and_says_where_it_goes_on(tmp_path, ranks, restarts, number, code):
    job = Job.write(tmp_path, tensor=ranks, pipeline=1)
    folder = tmp_path / "run"
    process = job.start(folder, "--training.steps", "100000", "--launch.restarts", str(restarts))
    wait_until(
        lambda: (folder / "checkpoints" / "step-000006" / "manifest.json").exists(),
        "no checkpoint of step 6",
        process=process,
    )
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=PATIENCE)
    last = find_latest(folder / "checkpoints")
    told = f"interrupted: the last checkpoint is {last}; {AGAIN}"
    assert (process.returncode, output.splitlines()[-1]) == (code, told), output
    assert last.name == f"step-{curve(folder)[-1][0]:06d}"
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert output.count(f"{name}: the run saves and ends after this step; ") == 1
    assert f"stopped after step {curve(folder)[-1][0]}: {name}" in output


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.extended
def test_a_run_whose_terminal_closes_saves(tmp_path, ranks):
    """Also where the live view is drawn: nothing can be written to the terminal any more."""
    job, folder = Job.write(tmp_path, tensor=ranks, pipeline=1), tmp_path / "run"
    command = job.command(folder, "--training.steps", "100000", "--checkpoint.every", "50000")
    closing = [sys.executable, "-m", "tests.support.closing_terminal", str(folder / "metrics.jsonl"), "4"]
    done = subprocess.run([*closing, *command], cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 75, done.stdout + done.stderr
    assert find_latest(folder / "checkpoints").name == f"step-{curve(folder)[-1][0]:06d}"


@pytest.mark.extended
def test_a_run_that_ignores_sighup_goes_on_without_its_terminal(tmp_path):
    """As after `disown`: a write to the terminal fails, and no signal says so."""
    job, folder = Job.write(tmp_path, tensor=2, pipeline=1), tmp_path / "run"
    ignoring = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"]
    command = [*ignoring, *job.command(folder, "--training.steps", "40")]
    closing = [sys.executable, "-m", "tests.support.closing_terminal", str(folder / "metrics.jsonl"), "4"]
    done = subprocess.run([*closing, *command], cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(curve(folder)) == 40


@pytest.mark.extended
def test_a_rank_that_is_stopped_goes_on_to_save_when_the_job_is_told_to_end(tmp_path):
    job, folder = Job.write(tmp_path, tensor=1, pipeline=1), tmp_path / "run"
    process = job.start(folder, "--training.steps", "100000", "--launch.restarts", "1")
    wait_until(lambda: _recorded_steps(folder) >= 4, "the job made no four steps", process=process)
    [rank] = forked_ranks(process.pid)
    os.kill(rank, signal.SIGSTOP)
    wait_until(lambda: is_stopped(rank), "the rank is not stopped")
    process.terminate()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, output
    assert find_latest(folder / "checkpoints").name == f"step-{curve(folder)[-1][0]:06d}"


@pytest.mark.extended
def test_a_damaged_last_checkpoint_names_the_older_one_that_is_intact(job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    *_, older, last = sorted((folder / "checkpoints").glob("step-*"))
    flipped = flip_checkpoint_bit(last, random.Random(0))
    process = job.start(folder, "--training.steps", "15")
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and "sha256 differs" in output
    assert flipped.tensor in output and flipped.file.name in output
    assert f"{older} is intact: remove {last.name}" in output
    assert f'checkpoint.resume = "{older}"' in output


@pytest.mark.extended
def test_a_run_that_cannot_save_ends_when_its_grace_time_is_over(tmp_path):
    """One rank stands still, so that the other waits for it in a collective; a second SIGTERM changes nothing."""
    job = Job.write(tmp_path, tensor=2, pipeline=1)
    folder = tmp_path / "run"
    process = job.start(folder, "--training.steps", "100000", "--launch.grace_seconds", "4")
    wait_until(lambda: _recorded_steps(folder) >= 4, "the job made no four steps", process=process)
    ranks = forked_ranks(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    process.terminate()
    told_at = time.monotonic()
    time.sleep(1.5)
    process.terminate()
    time.sleep(0.5)
    assert process.poll() is None and running(ranks) == ranks
    output, _ = process.communicate(timeout=PATIENCE)
    assert 4 <= time.monotonic() - told_at < 4 + soon(10)
    assert process.returncode == 143, output
    # The signal may come while a checkpoint of an earlier step is being written.
    reasons = (
        "the run was not over 4 s (launch.grace_seconds) after SIGTERM",
        "the checkpoint stood still for 4 s",
    )
    assert any(reason in output for reason in reasons), output
    last = find_latest(folder / "checkpoints")
    assert output.splitlines()[-1] == f"interrupted: the last checkpoint is {last}; {AGAIN}"
    assert not running(ranks)


@pytest.mark.parametrize(
    ("ranks", "stage", "number"),
    [
        (1, "  run folder ", signal.SIGTERM),
        (1, "tokenizing", signal.SIGUSR1),
        pytest.param(1, "model.kernels", signal.SIGTERM, marks=pytest.mark.slow),  # two ranks show more
        pytest.param(2, "  run folder ", signal.SIGUSR1, marks=pytest.mark.slow),  # as with one rank
        (2, "documents", signal.SIGTERM),
        (2, "model.kernels", signal.SIGUSR1),
    ],
)
@pytest.mark.extended
def test_a_signal_before_the_first_step_ends_in_good_order(tmp_path, ranks, stage, number):
    """While modules are imported, text is prepared, ranks meet or load: sent to all processes, as batch systems do."""
    job = Job.write(tmp_path, tensor=ranks, pipeline=1)
    folder = tmp_path / "run"
    process = job.start(folder, "--training.steps", "100000")
    _read_until(process, stage)
    for pid in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
    told_at = time.monotonic()
    output, _ = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - told_at < soon(30)
    assert process.returncode == 76, output
    assert _recorded_steps(folder) == 0 and "error: " not in output and "Traceback" not in output, output
    assert (
        f"interrupted: {folder / 'checkpoints'} has no checkpoint yet; the same command, or a requeue of the job, "
        "starts from the beginning"
    ) in output.splitlines(), output


def _read_until(process, text: str) -> None:
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the job ended before it said {text!r}")
