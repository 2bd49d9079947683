"""The folder of a run's copies in shared memory: whose it is, and when it is removed."""

import os
import shutil
import time
from pathlib import Path

import pytest

from megalite.checkpoint.in_memory import CopiesFolder, copies_name, forget_copies
from megalite.errors import LaunchError


def copies(memory: Path, checkpoints: Path) -> CopiesFolder:
    memory.mkdir(exist_ok=True)
    folder = CopiesFolder(memory / copies_name(checkpoints, new=False))
    folder.claim(checkpoints)
    folder.step(4).mkdir(exist_ok=True)
    return folder


def test_every_start_of_a_run_has_the_same_folder_and_no_other_run_has_it(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    name = copies_name(checkpoints, new=False)
    assert copies_name(checkpoints, new=False) == name
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    assert copies_name(tmp_path / "copied" / "checkpoints", new=False) != name
    assert copies_name(checkpoints, new=True) != name
    shutil.rmtree(checkpoints)  # to start over
    assert copies_name(checkpoints, new=False) != name


def test_a_start_removes_the_copies_of_runs_that_are_over(tmp_path):
    """Not those of a run that is under way, nor of one that failed lately."""
    memory, runs = (
        tmp_path / "memory",
        [tmp_path / name for name in ("live", "failed", "old", "gone", "without")],
    )
    folders = [copies(memory, run / "checkpoints") for run in runs]
    live, failed, old = folders[:3]
    for folder in folders[1:]:
        folder.release()
    shutil.rmtree(runs[3])
    forget_copies(runs[4] / "checkpoints")
    yesterday = time.time() - 25 * 3600
    for folder in (live, old):
        os.utime(folder.root, (yesterday, yesterday))
    own = copies(memory, tmp_path / "own" / "checkpoints")
    assert {path.name for path in memory.iterdir()} == {each.root.name for each in (live, failed, own)}
    assert failed.step(4).is_dir()


def test_a_folder_that_another_process_or_user_has_is_refused(tmp_path, monkeypatch):
    checkpoints = tmp_path / "run" / "checkpoints"
    first = copies(tmp_path / "memory", checkpoints)
    with pytest.raises(LaunchError, match=r"another process uses it.*checkpoint.in_memory_every = 0"):
        CopiesFolder(first.root).claim(checkpoints)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(LaunchError, match="another user has it"):
        CopiesFolder(first.root).claim(checkpoints)
    (tmp_path / "file").touch()
    monkeypatch.undo()
    with pytest.raises(LaunchError, match="File exists"):
        CopiesFolder(tmp_path / "file").claim(checkpoints)
