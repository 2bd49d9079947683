"""Marks of what a rank does: what they say, who can read them after the rank's death, which code leaves them."""

import signal
import subprocess
import sys

import pytest

from megalite.launcher.control.progress import Activity, Progress, RankMarks

KILLED_IN_A_COLLECTIVE = """
import os, signal, sys
from pathlib import Path
from megalite.launcher.control.progress import Activity, progress
progress.keep_in(Path(sys.argv[1]), 2)
progress.finished(12)
progress.begin(Activity.FORWARD_BACKWARD)
progress.collective("all_reduce", "tp")
os.kill(os.getpid(), signal.SIGKILL)
"""


def news(progress: Progress) -> tuple[int | None, str]:
    heartbeat = progress.heartbeat()
    assert RankMarks.from_dict(heartbeat["marks"]) == progress.marks()
    return heartbeat["step"], heartbeat["activity"]


@pytest.mark.parametrize(
    "change", [{"beats": "1"}, {"counts": []}, {"counts": {"tp": "x"}}, {"phase": 3}, {"more": 1}]
)
def test_what_is_no_table_of_marks_is_ignored(change):
    assert RankMarks.from_dict({**Progress().heartbeat()["marks"], **change}) is None
    assert RankMarks.from_dict({}) is None


def test_before_its_first_step_a_rank_has_an_activity_and_no_step():
    progress = Progress()
    assert news(progress) == (None, "starting")
    progress.begin(Activity.MEETING)
    assert news(progress) == (None, "meeting the other ranks")
    assert (progress.phase, progress.last_collective) == ("meeting the other ranks", "")


def test_a_step_and_a_collective_are_named_until_the_next_ones():
    progress = Progress()
    progress.finished(0)
    assert news(progress) == (0, "between two steps")
    progress.begin(Activity.REDUCING)
    progress.collective("all_reduce", "dp")
    progress.collective("barrier", "")
    assert progress.heartbeat()["activity"] == "reducing gradients, last collective: barrier"
    progress.collective("all_gather", "dense_gradients")
    assert progress.last_collective == "all_gather over dense_gradients"
    progress.finished(41)
    assert progress.step == 41
    progress.restart()
    assert news(progress) == (None, "starting")


def test_the_marks_of_a_killed_rank_can_be_read(tmp_path):
    path = tmp_path / "progress"
    Progress.create_file(path, 4)
    ended = subprocess.run([sys.executable, "-c", KILLED_IN_A_COLLECTIVE, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert news(Progress.read(path, 2)) == (12, "forward and backward, last collective: all_reduce over tp")
    assert Progress.read(path, 1).step is None


def test_without_a_file_there_are_no_marks(tmp_path):
    assert Progress.read(tmp_path / "nowhere", 0).heartbeat() == Progress().heartbeat()
    (tmp_path / "short").write_bytes(b"12345")
    assert Progress.read(tmp_path / "short", 3).step is None


@pytest.mark.parametrize("activity", Activity)
def test_every_activity_is_a_phrase(activity):
    progress = Progress()
    progress.begin(activity)
    assert progress.phase == activity.value and activity.value[0].islower()
