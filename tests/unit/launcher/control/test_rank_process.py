"""The end of a launched rank: what it writes, tells, shows and exits with, whoever notices the failure."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import megalite
from megalite.errors import DataError, RankFailure
from megalite.launcher.control import rank_process as launched
from megalite.launcher.control.failures import FailureReport
from megalite.launcher.control.member import JobEnded
from megalite.launcher.control.messages import Verdict
from megalite.launcher.control.progress import Activity, progress
from megalite.launcher.control.rank_process import RankEnd, run_rank
from megalite.launcher.rank.detect import RankInfo
from megalite.topology.axes import Layout
from tests.support.waiting import PATIENCE, soon

LAYOUT = Layout(pipeline=2, tensor=2)
VERDICT = Verdict("rank 3 (pp 1, dp 0, tp 1) on n1: ValueError: boom:\n  at step.py:1", 1, rank=3, host="n1")


class Ended(BaseException):
    """In place of the end of the process."""

    def __init__(self, code: int):
        self.code = code


class Judge:
    """A coordinator with one verdict."""

    def __init__(self, verdict: Verdict | None = None, seconds: float = 0.0):
        self.verdict, self.seconds, self.reports = verdict, seconds, list[FailureReport]()
        self.stops = list[tuple[str, int]]()

    def stop(self, text: str, exit_code: int) -> Verdict | None:
        self.stops.append((text, exit_code))
        return None

    def pass_on(self) -> None:
        pass

    def fail(self, report: FailureReport) -> Verdict | None:
        self.reports.append(report)
        time.sleep(self.seconds)
        return self.verdict


class Rank:
    """One of two ranks on each of two hosts, and what it shows."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        judge: Judge | None = None,
        *,
        shows_verdict: bool = True,
        say: Callable[[str], None] | None = None,
    ):
        host = rank // 2
        info = RankInfo(rank, 4, rank % 2, 2, "n0", 29500, "slurm", f"n{host}", job="17.0", node_rank=host)
        self.shown: list[str] = []
        self.end = RankEnd(info, LAYOUT, folder, say=say or self.shown.append, shows_verdict=shows_verdict)
        self.end.judge, self.judge, self.folder = judge, judge, folder

    def fails(self, error: Exception) -> int:
        with pytest.raises(Ended) as ended:
            self.end.failed(error)
        return ended.value.code

    def is_told(self, verdict: Verdict) -> int:
        with pytest.raises(Ended) as ended:
            self.end.job_ended(verdict)
        return ended.value.code

    def report(self) -> dict:
        return json.loads((self.folder / f"rank-{self.end.info.rank:05d}.json").read_text())


@pytest.fixture(autouse=True)
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(launched, "end_process", end)
    progress.restart()


def test_a_failing_rank_reports_is_judged_and_ends_with_the_code_of_the_cause(tmp_path):
    rank = Rank(tmp_path, 3, Judge(Verdict(VERDICT.text, 2, 3, "n1")))
    assert rank.fails(ValueError("boom")) == 2
    [sent] = rank.judge.reports
    assert sent.message == "boom" and sent.file == str(tmp_path / "rank-00003.json")
    assert rank.report()["traceback"].endswith("ValueError: boom\n")


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    ("rank", "shown"),
    [
        (0, [f"error: {VERDICT.text}"]),
        (1, []),
        (2, ["the ranks on n1 end: rank 3 (pp 1, dp 0, tp 1) on n1: ValueError: boom"]),
        (3, []),
    ],
)
def test_rank_0_shows_the_verdict_and_every_other_host_one_line(tmp_path, rank, shown, fails):
    each = Rank(tmp_path, rank, Judge(VERDICT))
    code = each.fails(RuntimeError("Connection closed by peer")) if fails else each.is_told(VERDICT)
    assert (code, each.shown) == (1, shown)


def test_the_second_rank_of_a_host_speaks_for_its_first_that_is_at_fault(tmp_path):
    verdict = Verdict("rank 2 (pp 1, dp 0, tp 0) on n1: vanished", 1, rank=2, host="n1")
    rank = Rank(tmp_path, 3)
    assert rank.is_told(verdict) == 1
    assert rank.shown == ["the ranks on n1 end: rank 2 (pp 1, dp 0, tp 0) on n1: vanished"]


def test_an_error_of_all_ranks_is_shown_by_rank_0_alone(tmp_path):
    verdict = Verdict("data.source: /nowhere: no such file", 2)
    shown = []
    for number in range(4):
        rank = Rank(tmp_path, number, Judge(verdict))
        assert rank.fails(DataError("data.source: /nowhere: no such file")) == 2
        shown += rank.shown
    assert shown == ["error: data.source: /nowhere: no such file"]


def test_under_a_launching_process_that_shows_the_verdict_rank_0_does_not(tmp_path):
    rank = Rank(tmp_path, 0, Judge(VERDICT), shows_verdict=False)
    assert (rank.fails(ValueError("boom")), rank.shown) == (1, [])


def test_a_vanished_rank_0_is_named_once_on_each_host(tmp_path):
    progress.finished(12)
    progress.begin(Activity.REDUCING)
    lost = Verdict("the coordinator of the job at 10.0.0.1 vanished: killed", 1, coordinator_lost="killed")
    shown = {}
    for number in (1, 2, 3):
        rank = Rank(tmp_path, number)
        assert rank.is_told(lost) == 1
        shown[number] = rank.shown
    assert shown[3] == []
    for number in (1, 2):
        [line] = shown[number]
        assert line == (
            "error: rank 0 (pp 0, dp 0, tp 0) on n0 vanished: killed\n"
            f"  rank {number} was after step 12: reducing gradients"
        )


def test_a_stop_in_good_order_is_no_error_and_a_line_of_rank_0_alone(tmp_path):
    verdict = Verdict("SIGTERM before the end of the first step", 76, rank=3, host="n1")
    for number, shown in ((0, [verdict.text]), (2, [])):
        rank = Rank(tmp_path, number)
        assert (rank.is_told(verdict), rank.shown) == (76, shown)


def test_a_signal_of_the_launcher_does_not_replace_the_failure_that_ends_the_rank(tmp_path):
    """Launchers send SIGTERM to all ranks as soon as one has failed."""
    rank = Rank(tmp_path, 0, Judge(VERDICT))
    rank.end.stopping("SIGTERM", 76)
    assert rank.judge.stops == [("SIGTERM", 76)]
    failing = Rank(tmp_path, 0, Judge(VERDICT))
    assert failing.fails(ValueError("boom")) == 1
    stopping = threading.Thread(target=failing.end.stopping, args=("SIGTERM", 76), daemon=True)
    stopping.start()
    stopping.join(0.1)
    assert stopping.is_alive() and not failing.judge.stops


def test_a_rank_that_waited_for_others_ends_as_they_do(tmp_path):
    rank = Rank(tmp_path, 0)
    assert rank.fails(JobEnded(Verdict("ranks 2-3 did not arrive", 1))) == 1
    assert rank.shown == ["error: ranks 2-3 did not arrive"]
    assert not list(tmp_path.iterdir())


def test_without_a_verdict_a_rank_shows_its_own_failure(tmp_path):
    rank = Rank(tmp_path, 3, Judge(None))
    assert rank.fails(DataError("shard-3.bin: truncated")) == 2
    assert rank.shown[0].startswith("error: rank 3 (pp 1, dp 0, tp 1) on n1: shard-3.bin: truncated")


def test_a_rank_without_a_launcher_says_nothing_to_the_user_and_something_to_the_others(tmp_path):
    rank = Rank(tmp_path, 2, Judge(VERDICT, seconds=600))
    began = time.monotonic()
    with pytest.raises(Ended) as ended:
        rank.end.launcher_gone("process 17 has ended")
    assert ended.value.code == 1 and time.monotonic() - began < soon()
    assert rank.shown == [] and len(rank.judge.reports) == 1
    assert rank.report()["message"] == "ended itself, because its launcher is gone: process 17 has ended"


def test_a_folder_or_a_terminal_that_cannot_be_written_does_not_keep_a_rank(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    rank = Rank(tmp_path / "file" / "failures", 3, say=lambda _: time.sleep(600))
    monkeypatch.setattr(launched, "_SAY_SECONDS", 0.1)
    began = time.monotonic()
    assert rank.fails(ValueError("boom")) == 1
    assert time.monotonic() - began < soon()


def test_a_single_rank_raises(tmp_path):
    info = RankInfo(0, 1, 0, 1, "n0", 29500, "torchrun", "n0")

    def worker(error: Exception) -> int:
        raise error

    def run(error: Exception) -> int:
        return run_rank(lambda info: worker(error), RankEnd(info, Layout(), tmp_path))

    with pytest.raises(DataError, match=r"^truncated$"):
        run(DataError("truncated"))
    with pytest.raises(RankFailure, match=r"^rank 0 \(pp 0, dp 0, tp 0\) on n0: ValueError: boom\n"):
        run(ValueError("boom"))


BLOCKED = """
import ctypes, sys, threading
from pathlib import Path
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.control.rank_process import RankEnd
from megalite.launcher.control.messages import Verdict
from megalite.topology.axes import Layout
info = RankInfo(0, 2, 0, 2, "n0", 1, "slurm", "n0")
end = RankEnd(info, Layout(tensor=2), Path(sys.argv[1]), say=lambda text: print(text, flush=True))
threading.Timer(0.1, end.job_ended, [Verdict("rank 1 on n0: gone", 1, 1, "n0")]).start()
try:
    ctypes.CDLL(None).sleep(600)
finally:
    print("unwound")
"""


def test_a_rank_that_is_blocked_outside_of_python_ends_too(tmp_path):
    began = time.monotonic()
    root = Path(megalite.__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=root,
    )
    assert (ended.returncode, ended.stdout) == (1, "error: rank 1 on n0: gone\n"), ended.stderr
    assert time.monotonic() - began < soon()
