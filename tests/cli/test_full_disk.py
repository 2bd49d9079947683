"""A disk that takes no more, under any command: one line names the file and says what to do, also with --json."""

import errno
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megalite.cli import commands, main, results
from megalite.errors import disk_error, named
from tests.support.jobs import ROOT

FULL = "No space left on device; free space there, or name a place on another disk"
UNLIMITED = "raise the limit of file sizes (ulimit -f unlimited)"


def run(
    *words: str,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    file_bytes: int = resource.RLIM_INFINITY,
    **environ: str,
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "megalite", *words],
        stdout=stdout,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        # Python would cut the bytecode that it caches off at the limit, and never read it again.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environ},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY)),
    )


@pytest.mark.parametrize("buffer", ["", "1"])
@pytest.mark.parametrize("words", [["config", "presets"], ["--help"], ["config", "presets", "--json"]])
def test_standard_output_on_a_full_disk(words: Sequence[str], buffer: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = run(*words, stdout=full.fileno(), PYTHONUNBUFFERED=buffer)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: standard output: {FULL}"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_text_that_a_full_disk_refuses_at_the_end_changes_no_exit_code() -> None:
    """The rest of the buffer cannot be written either: Python would say so, and end with 120."""
    program = "import sys; from megalite.cli import main; print('text'); sys.exit(main(['plan', 'no-model']))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    assert done.returncode == 2 and "Exception ignored" not in done.stderr, done.stderr


class ClosedTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(("code", "ends_with"), [(0, 141), (75, 75)])
def test_a_document_for_a_terminal_that_has_closed_keeps_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, code: int, ends_with: int
) -> None:
    monkeypatch.setattr(sys, "stdout", ClosedTerminal())
    assert results.with_document(lambda: code) == ends_with


def test_a_log_of_both_streams_on_a_full_disk_still_has_an_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        assert run("config", "presets", stdout=full.fileno(), stderr=subprocess.STDOUT).returncode == 2


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["plan", "llama-3.1-8b", "--card", "H100 80GB HBM3", "--write", "{}/run.toml"], "run.toml"),
        (["examples", "{}/copied"], "copied/examples/"),
        (["init", "{}/new.toml", "--source=stdlib", "--size=tiny", "--processes=1"], "new.toml"),
    ],
)
def test_a_file_that_hits_the_limit_of_sizes(words: list[str], file: str, tmp_path: Path) -> None:
    done = run(*[word.format(tmp_path) for word in words], "--json", file_bytes=0)
    [problem] = json.loads(done.stdout)["error"]["problems"]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert problem["rule"].startswith(str(tmp_path / file)) and "File too large" in problem["rule"]
    assert problem["remedy"] == UNLIMITED


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> object:
        raise error

    monkeypatch.setattr(commands, "import_module", import_module)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "a file of this command, maybe in TMPDIR: Disk quota"),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), "/a: Permission denied; check its perm"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a", None, "/b"), f"/b: {FULL}"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "No usable temporary directory found in ['/tmp']; free space, or set TMPDIR to a folder",
        ),
    ],
)
def test_errors_of_a_disk(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(error, monkeypatch)
    assert main(["top"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(errno.ENOENT, "No such file", "/a"), PermissionError(errno.EPERM, "not permitted")],
)
def test_other_errors_keep_their_traceback(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(error, monkeypatch)
    with pytest.raises(OSError, match=error.strerror):
        main(["top"])


def test_a_write_is_given_the_name_of_its_file() -> None:
    with pytest.raises(OSError, match="'/a'") as raised, named(Path("/a")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(disk_error(raised.value)) == f"/a: {FULL}"
    with pytest.raises(ConnectionResetError) as reset, named(Path("/a")):
        raise ConnectionResetError(errno.ECONNRESET, "reset")
    assert reset.value.filename is None


def test_facts_of_a_forked_rank_and_of_its_parent_are_in_one_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> int:
        results.report(before=1, text=Path("a"))
        if (rank := os.fork()) == 0:
            results.report(rank=[2])
            os._exit(0)
        os.waitpid(rank, 0)
        results.report(after=3, before=4)
        return 0

    assert results.with_document(work) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"exit_code": 0, "rank": [2], "before": 4, "text": "a", "after": 3}
