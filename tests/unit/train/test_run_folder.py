"""A run's folder belongs to one job at a time."""

import errno
import os
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megalite import Trainer
from megalite.config.load import load_run
from megalite.errors import ConfigError, TrainingError
from megalite.train import inputs, run
from megalite.train.run_folder import RunFolder
from tests.unit.config.runs import changed, write_run


def test_a_folder_is_claimed_until_its_job_ends(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "one")
    with folder.claimed(), pytest.raises(ConfigError, match=r"run\.folder: another job uses"):
        claim(folder)
    claim(folder)


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_claim(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.claimed():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        claim(folder)
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "the child must have lived until then"


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.folder: .*file cannot be written"):
        claim(RunFolder(tmp_path / "file"))


def test_no_second_job_prepares_what_the_first_one_prepares_or_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Imported during the run, the module would keep the replaced function for later tests.
    import_module("megalite.train.rank")
    config = load_run(write_run(tmp_path, changed({})), ["--run.folder", str(tmp_path / "run")]).config
    folder, seen = RunFolder(tmp_path / "run"), list[str]()

    def tried_during(what: str) -> Any:
        def try_to_claim(*_: Any, **__: Any) -> int:
            with pytest.raises(ConfigError, match="another job uses"):
                claim(folder)
            seen.append(what)
            return 0

        return try_to_claim

    monkeypatch.setattr(inputs, "prepare_inputs", tried_during("preparation"))
    monkeypatch.setattr(run, "run_local_ranks", tried_during("training"))
    monkeypatch.setattr(run, "prepare_process", lambda *_, **__: 1)
    assert Trainer(config).run("run.toml") == 0
    assert seen == ["preparation", "training"]
    claim(folder)


def claim(folder: RunFolder) -> None:
    with folder.claimed():
        pass


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "No space left on device; free space there, or set run.folder to another disk"),
        (errno.EFBIG, "File too large; raise the limit of file sizes (ulimit -f unlimited)"),
    ],
)
def test_a_full_disk_is_explained(tmp_path: Path, number: int, remedy: str) -> None:
    """It ends the run at the next line of metrics.jsonl."""
    with pytest.raises(TrainingError) as caught, RunFolder(tmp_path).full_disk_explained():
        raise OSError(number, os.strerror(number))
    assert str(caught.value) == f"{tmp_path} cannot be written: {remedy}, then run again to resume"
    with pytest.raises(FileNotFoundError), RunFolder(tmp_path).full_disk_explained():
        (tmp_path / "missing").read_text()
