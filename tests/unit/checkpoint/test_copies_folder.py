"""The folder of a run's copies in shared memory: whose it is, and when it is removed."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from megalite.checkpoint.copies_folder import CopiesFolder, copies_name, forget_copies, reclaimable_bytes
from megalite.checkpoint.in_memory import whole_copies
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


def test_copies_of_earlier_starts_and_of_runs_that_are_over_count_as_room(tmp_path):
    """A start after a kill has the room of the copies that it goes on from, or it would be refused."""
    memory, runs = tmp_path / "memory", [tmp_path / name for name in ("own", "over", "failed")]
    assert not reclaimable_bytes(runs[0], memory)
    for size, run in enumerate(runs, start=1):
        (copies(memory, run).step(4) / "rank-00000.safetensors").write_bytes(bytes(10**size))
    forget_copies(runs[1])
    assert reclaimable_bytes(runs[0], memory) == 10 + 100


def test_a_folder_that_another_user_has_planted_is_not_touched(tmp_path, monkeypatch):
    """Neither a link of such a name, nor a folder with links: a lock that is opened there would alter a file."""
    memory, precious = tmp_path / "memory", tmp_path / "precious"
    for name in (memory, precious):
        name.mkdir()
    (precious / "file").write_text("precious")
    name = f"megalite-copies-{os.getuid()}"
    (memory / f"{name}-link").symlink_to(precious)
    planted = memory / f"{name}-folder"
    planted.mkdir()
    (planted / "run").write_text(str(tmp_path / "gone"))
    (planted / "lock").symlink_to(precious / "file")
    yesterday = time.time() - 25 * 3600
    for path in (precious, planted):
        os.utime(path, (yesterday, yesterday))
    lstat = Path.lstat

    def owned(path: Path) -> os.stat_result:
        found = list(lstat(path))
        found[4] += path == planted  # the user
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", owned)
    copies(memory, tmp_path / "run")
    assert planted.is_dir() and (precious / "file").read_text() == "precious"
    assert [path.name for path in precious.iterdir()] == ["file"]


@pytest.mark.parametrize("manifest", ['{"step": 4', "{}", '{"step": 4}'])
def test_a_copy_with_a_damaged_note_does_not_keep_the_run_from_its_checkpoint(manifest):
    table = json.dumps(["rank-00000.safetensors", None, []])
    note = {"step": 4, "start": "first", "ranks": 1, "table": table, "manifest": manifest}
    assert not list(whole_copies({0: [note]}))
