"""The folder of local ranks goes with its job: what a killed starter left is removed by the next start."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megalite.launcher.control.starter_folder import starter_folder
from tests.support.jobs import ROOT
from tests.support.waiting import PATIENCE

STARTER = """
import os, sys
from megalite.launcher.control.starter_folder import starter_folder
with starter_folder() as folder:
    (folder / "rendezvous").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def started() -> "tuple[subprocess.Popen[str], Path]":
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_start_removes_the_folder_of_a_killed_one_alone(scratch: Path) -> None:
    (killed, abandoned), (living, used) = started(), started()
    foreign = scratch / "elsewhere"
    foreign.mkdir()
    link = abandoned.with_name(f"{abandoned.name}-link")
    link.symlink_to(foreign)
    killed.kill()
    killed.communicate(timeout=PATIENCE)
    assert (abandoned / "rendezvous").exists()
    with starter_folder() as own:
        assert own.is_dir() and not abandoned.exists()
        assert (used / "rendezvous").exists() and link.is_symlink() and foreign.is_dir()
    assert not own.exists()
    living.communicate(timeout=PATIENCE)
    assert living.returncode == 0 and not used.exists()


def test_a_folder_that_another_start_took_before_the_lock_is_made_anew(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def taken(prefix: str) -> str:
        made.append(scratch / f"{prefix}{len(made)}")
        if len(made) > 1:
            made[-1].mkdir()
        return str(made[-1])

    monkeypatch.setattr("megalite.launcher.control.starter_folder.mkdtemp", taken)
    with starter_folder() as folder:
        assert folder == made[1] and folder.is_dir()
