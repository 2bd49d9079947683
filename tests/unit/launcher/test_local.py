"""Jobs of real processes with toy ranks: what they show, how and how soon they end, and what runs on."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import megalite
from megalite.launcher import local
from megalite.launcher.exit_codes import SAME_PRESS_SECONDS
from tests.support import local_job
from tests.support.waiting import PATIENCE, processes_with, soon, wait_until

ROOT = Path(megalite.__file__).parents[1]
MARK = "MEGALITE_TEST_JOB"
FIRST = "rank 3 (pp 0, dp 1, tp 1) on "


class Job:
    """One started job and every process that descends from it, told by a variable that all inherit."""

    def __init__(
        self,
        folder: Path,
        behaviour: str,
        world_size: int = 8,
        environ: Mapping[str, str] | None = None,
        *,
        ignores_interrupts: bool = False,
    ):
        self.folder, self.mark, self.started = folder, uuid.uuid4().hex, time.monotonic()
        command = [sys.executable, "-m", "tests.support.local_job", behaviour, str(folder), str(world_size)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], MARK: self.mark, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignores_interrupts else None,
        )

    def wait_until_ready(self, ranks: int = 8) -> None:
        def ready() -> bool:
            return len(list(self.folder.glob("ready-*"))) >= ranks

        wait_until(ready, f"not all of {ranks} ranks are ready", process=self.process)

    def finish(self) -> tuple[int, str, float]:
        """Exit code, what is on stderr, and the seconds it took since `started`."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors, time.monotonic() - self.started

    def left_running(self) -> list[int]:
        return processes_with(f"{MARK}={self.mark}")

    def reports(self) -> dict[int, dict]:
        files = (self.folder / "failures").glob("*")
        return {report["rank"]: report for report in (json.loads(path.read_text()) for path in files)}


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    jobs: list[Job] = []

    def start_job(behaviour: str, **options) -> Job:
        jobs.append(Job(tmp_path, behaviour, **options))
        return jobs[-1]

    yield start_job
    left = [pid for job in jobs for pid in job.left_running()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left running: {left}"


def test_every_rank_runs_and_knows_its_place(start, tmp_path):
    code, errors, _ = start("succeed").finish()
    assert (code, errors) == (0, "")
    for rank in range(8):
        seen = eval((tmp_path / f"seen-{rank}").read_text())
        assert seen == {
            "RANK": str(rank),
            "WORLD_SIZE": "8",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "LOCAL_SIZE": "8",
            "frozen": "True",
        }


def test_an_exception_ends_the_job_and_is_shown_once_with_coordinates(start):
    job = start("one_raises")
    code, errors, seconds = job.finish()
    assert code == 1 and seconds < soon()
    assert errors.startswith(f"error: {FIRST}")
    assert errors.count("ValueError: the moon is in the wrong place") == 1
    assert "local_job.py:" in errors and "in one_raises" in errors
    assert "failures/rank-00003.json" in errors and "Traceback" not in errors
    [report] = job.reports().values()
    assert report["coordinates"] == {"pp": 0, "dp": 1, "tp": 1}
    assert report["exception"] == "ValueError" and not report["secondary"]
    assert report["traceback"].rstrip().endswith("ValueError: the moon is in the wrong place")


def test_ranks_that_ignore_sigterm_are_killed_in_time(start):
    code, errors, seconds = start("one_raises_and_the_others_are_deaf").finish()
    assert code == 1 and seconds < soon()
    assert errors.startswith(f"error: {FIRST}") and "the moon" in errors


def test_a_rank_that_just_exits_is_named(start):
    job = start("one_exits")
    code, errors, seconds = job.finish()
    assert code == 1 and seconds < soon()
    assert errors.startswith(f"error: {FIRST}")
    assert "ended with exit code 7 and left no report" in errors
    assert list(job.reports()) == [3]


def test_a_killed_rank_is_the_cause_and_not_those_that_noticed(start):
    job = start("one_is_killed_and_the_others_notice")
    code, errors, seconds = job.finish()
    assert code == 1 and seconds < soon()
    assert errors.startswith(f"error: {FIRST}")
    assert "was killed by signal 9 (SIGKILL): the kernel's out-of-memory killer" in errors
    assert "Connection closed" not in errors
    reports = job.reports()
    assert not reports.pop(3)["secondary"]
    assert all(report["secondary"] for report in reports.values())


def test_a_cause_reported_after_its_consequences_is_still_the_cause(start):
    code, errors, _ = start("one_raises_late_and_the_others_notice_first").finish()
    assert code == 1
    assert errors.startswith(f"error: {FIRST}") and "the moon" in errors and "closed by peer" not in errors


@pytest.mark.extended
def test_ranks_that_hang_after_one_that_lost_a_peer_are_killed_in_time(start):
    code, errors, seconds = start("one_loses_a_peer").finish()
    assert code == 1 and seconds < soon()
    assert errors.startswith(f"error: {FIRST}") and "closed by peer" in errors


def test_the_waits_after_a_failure_are_within_the_two_seconds_that_the_pages_promise():
    assert 0 < local._AFTER_CAUSE_SECONDS < local._AFTER_CONSEQUENCE_SECONDS < 2


def test_processes_that_a_killed_rank_had_started_end_too(start):
    code, errors, seconds = start("one_is_killed_with_helpers").finish()
    assert code == 1 and seconds < soon()
    assert "SIGKILL" in errors


def test_an_error_that_all_ranks_raise_alike_is_shown_once_without_coordinates(start):
    code, errors, _ = start("all_meet_and_raise_alike").finish()
    assert (code, errors) == (2, "error: data.source: /nowhere: no such file\n")


def test_ranks_that_stop_in_good_order_are_no_failure(start):
    job = start("some_stop_in_good_order")
    code, errors, _ = job.finish()
    assert (code, errors) == (75, "") and not job.reports()


def test_ctrl_c_ends_all_ranks_quietly(start):
    job = start("wait")
    job.wait_until_ready()
    job.started = time.monotonic()
    os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does: to every process in the foreground
    code, errors, seconds = job.finish()
    assert (code, errors) == (130, "") and seconds < soon()


def test_after_ctrl_c_the_ranks_may_take_their_time_to_save(start, tmp_path):
    job = start("save_when_interrupted")
    job.wait_until_ready()
    os.killpg(job.process.pid, signal.SIGINT)
    job.process.send_signal(signal.SIGINT)  # the same one, which a program between passes on
    code, errors, _ = job.finish()
    assert (code, errors) == (130, "") and len(list(tmp_path.glob("saved-*"))) == 8


def test_a_second_ctrl_c_ends_the_ranks_at_once(start, tmp_path):
    job = start("wait_deaf_to_interrupts")
    job.wait_until_ready()
    os.killpg(job.process.pid, signal.SIGINT)

    def all_interrupted() -> bool:
        return len(list(tmp_path.glob("interrupted-*"))) == 8

    wait_until(all_interrupted, "the first press did not reach all ranks", process=job.process)
    time.sleep(2 * SAME_PRESS_SECONDS)
    assert job.process.poll() is None and len(job.left_running()) == 9
    job.started = time.monotonic()
    os.killpg(job.process.pid, signal.SIGINT)
    code, errors, seconds = job.finish()
    assert (code, errors) == (130, "") and seconds < soon()


def test_a_job_in_the_background_ignores_ctrl_c(start):
    """A shell starts it so, and a later Ctrl-C is meant for another program."""
    job = start("wait", ignores_interrupts=True)
    job.wait_until_ready()
    for _ in range(2):
        os.killpg(job.process.pid, signal.SIGINT)
        time.sleep(0.4)
    assert job.process.poll() is None and len(job.left_running()) == 9
    job.process.terminate()
    assert job.finish()[0] == 143


def test_a_save_that_fails_after_ctrl_c_is_shown(start):
    job = start("fail_when_interrupted")
    job.wait_until_ready()
    os.killpg(job.process.pid, signal.SIGINT)
    code, errors, _ = job.finish()
    assert (code, errors) == (2, "error: the checkpoint cannot be written: no space left\n")


def test_processes_of_the_user_s_own_threads_live_on(start, tmp_path):
    """Only what ranks started is ended with them: neither a child of the user's, nor a child's that it left behind."""
    job = start("one_is_killed_beside_a_process_of_the_users")
    code, errors, _ = job.finish()
    assert code == 1 and "SIGKILL" in errors
    users = [int(each) for each in (tmp_path / "users").read_text().split()]
    assert sorted(job.left_running()) == sorted(users) and len(users) == 2
    for process in users:
        os.kill(process, signal.SIGKILL)
    wait_until(lambda: not job.left_running(), "they run on")


def test_sigterm_is_passed_on(start):
    job = start("wait")
    job.wait_until_ready()
    job.process.terminate()
    code, errors, _ = job.finish()
    assert (code, errors) == (143, "") and not job.reports()


def test_after_sigterm_the_ranks_may_take_their_time_to_stop_in_good_order(start):
    job = start("stop_when_told")
    job.wait_until_ready()
    job.process.terminate()
    code, errors, _ = job.finish()
    assert (code, errors) == (75, "")


def test_ranks_die_with_a_killed_parent(start):
    job = start("wait")
    job.wait_until_ready()
    assert len(job.left_running()) == 9
    job.process.kill()
    job.process.communicate(timeout=PATIENCE)
    wait_until(lambda: not job.left_running(), "ranks outlive their parent", soon())


def test_reports_of_an_earlier_run_are_forgotten(start):
    job = start("one_exits")
    job.finish()
    assert job.reports()
    later = start("succeed")
    assert later.finish()[0] == 0 and not later.reports()


def test_a_single_rank_runs_in_the_starting_process(start):
    code, errors, _ = start("all_raise_alike", world_size=1).finish()
    assert (code, errors) == (2, "error: data.source: /nowhere: no such file\n")
    code, errors, _ = start("succeed", world_size=1).finish()
    assert (code, errors) == (0, "")


def launched(rank: int) -> dict[str, str]:
    """The variables of one of eight ranks that something else started."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "8",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_a_launched_rank_shows_its_own_failure(start):
    code, errors, _ = start("one_raises", environ=launched(3)).finish()
    assert code == 1
    assert errors.startswith(f"error: {FIRST}") and "the moon" in errors and "full report" in errors


def test_a_launched_rank_that_lost_a_peer_says_so_in_one_line(start):
    code, errors, _ = start("one_is_killed_and_the_others_notice", environ=launched(5)).finish()
    assert code == 1 and errors.count("\n") == 1
    assert (
        errors.startswith("error: rank 5 (pp 1, dp 0, tp 1) on ")
        and "ends, because it lost another rank" in errors
    )


def test_launched_ranks_that_fail_alike_show_the_whole_block_once(start):
    code, errors, _ = start("all_raise_alike", environ=launched(2)).finish()
    assert code == 2 and errors.startswith("error: rank 2 ") and "/nowhere: no such file" in errors
    code, errors, _ = start("all_raise_alike", environ=launched(0)).finish()
    assert (
        code == 2 and errors.startswith("error: rank 0 ") and errors.endswith(" failed alike: see rank 2\n")
    )


def test_a_launched_rank_that_cannot_exit_is_ended_at_once_with_its_code(start):
    code, errors, seconds = start("one_raises_and_cannot_exit", environ=launched(3)).finish()
    assert code == 1 and seconds < soon()
    assert "the moon" in errors


def test_launched_ranks_that_cannot_connect_say_why_and_what_to_do(start):
    """No rank was lost: these are first causes."""
    code, errors, _ = start("cannot_connect", environ=launched(5)).finish()
    assert code == 1 and "another rank" not in errors and "Traceback" not in errors
    assert "the ranks cannot connect to each other: Gloo connectFullMesh failed" in errors
    assert "set GLOO_SOCKET_IFNAME to the network interface" in errors and "/etc/hosts" in errors


def test_the_report_of_a_killed_rank_has_its_last_step_and_collective(start):
    job = start("one_is_killed_and_the_others_notice")
    _, errors, _ = job.finish()
    assert "after step 12: reducing gradients, last collective: all_reduce over dp" in errors
    assert errors.splitlines()[-1] == "  7 other ranks stopped because of it"
    report = job.reports()[3]
    assert (report["signal"], report["step"], report["activity"], report["collective"]) == (
        "SIGKILL",
        12,
        "reducing gradients",
        "all_reduce over dp",
    )


def test_the_toy_ranks_agree_with_the_coordinates_asserted_here():
    assert local_job.FAILING == 3
