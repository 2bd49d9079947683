"""A temporary folder that takes no files is no verdict on a layout: one line says so, and the exit code is 2."""

import errno
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.errors import DataError, RankFailure
from megalite.launcher.local import LocalStart
from megalite.verify.run import train_ranks
from megalite.verify.scratch import ScratchError, scratch_error_of, scratch_explained
from tests.support.file_limit import file_size_limit
from tests.support.jobs import Job
from tests.support.tiny import tiny_shape
from tests.unit.verify.test_from_folder import written


@pytest.mark.parametrize(
    ("mode", "kibibytes"),
    [("run", 10), ("run", 40), ("matrix", 40), ("folder", 10)],
    ids=["the drawn text", "the records of a rank", "the records in a matrix", "the random tokens"],
)
def test_a_full_temporary_folder_is_named_in_one_line(tmp_path: Path, mode: str, kibibytes: int) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = ["verify", "--from", str(written(tmp_path / "model", tiny_shape()))]
    if mode != "folder":
        words = ["verify", str(Job.write(tmp_path, tensor=1, pipeline=1, data=2).run_file), "--steps", "1"]
    words += ["--matrix", "2"] if mode == "matrix" else []
    limit = (kibibytes << 10, resource.RLIM_INFINITY)
    done = subprocess.run(
        [sys.executable, "-m", "megalite", *words, "--output", str(tmp_path / "proof.json"), "--json"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
        # Python would cut the bytecode that it caches off at the limit, and never read it again.
        env={**os.environ, "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    [problem] = json.loads(done.stdout)["error"]["problems"]
    assert done.returncode == 2 and problem["key"] == "TMPDIR", done.stderr
    assert problem["rule"].endswith(f" in {scratch} (TMPDIR) cannot be written: File too large")
    assert problem["remedy"] == "raise the limit of file sizes (ulimit -f unlimited)"
    assert "Traceback" not in done.stderr and done.stderr.count("File too large") == 1
    assert not list(scratch.glob("megalite-*"))


def test_ranks_that_die_without_a_report_have_a_full_folder_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of a rank is a file on the same disk."""

    def dies(*arguments: object, **settings: object) -> int:
        raise RankFailure("rank 0: ended with exit code 2 and left no report; see what it printed")

    monkeypatch.setattr("megalite.verify.run.run_local_ranks", dies)
    job = SimpleNamespace(config=SimpleNamespace(layout=None))
    with pytest.raises(RankFailure, match="left no report"):
        train_ranks(dies, tmp_path, job, LocalStart())
    with file_size_limit(4096), pytest.raises(ScratchError, match=r"TMPDIR.* limit of file sizes"):
        train_ranks(dies, tmp_path, job, LocalStart())


@pytest.mark.parametrize("explained", [False, True])
def test_a_full_disk_asks_for_another_folder(explained: bool) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    remedy = r"No space left on device; free space there, or set TMPDIR to a folder"
    with pytest.raises(ScratchError, match=remedy), scratch_explained():
        if explained:
            raise DataError("the data cannot be written; choose another run.folder") from full
        raise full


def test_standard_output_on_a_full_disk_is_not_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No space left"), Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        with scratch_explained():
            print("compared")


def test_no_temporary_folder_at_all_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", missing)
    with (
        pytest.raises(ScratchError, match=r"cannot be made: No usable .*; set TMPDIR to"),
        scratch_explained(),
    ):
        tempfile.mkdtemp()


def test_other_errors_pass() -> None:
    with pytest.raises(FileNotFoundError), scratch_explained():
        Path("missing").read_text()
    assert scratch_error_of(RankFailure("rank 1 failed: ValueError: a bug")) is None
