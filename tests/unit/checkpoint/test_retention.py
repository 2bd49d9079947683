"""`best`, and which older checkpoints are removed when."""

import shutil
from pathlib import Path

import pytest

from megalite.checkpoint import publish as publish_module
from megalite.checkpoint.folder import BEST, find_best, find_checkpoint, find_latest, published_name
from megalite.checkpoint.manifest import MANIFEST, Manifest
from megalite.checkpoint.manifest_json import to_json
from megalite.checkpoint.publish import remove_older, remove_stale, write_best, write_latest
from megalite.errors import CheckpointError
from megalite.topology.axes import Layout
from tests.support.tiny import tiny_shape


def checkpoint(folder: Path, step: int) -> Path:
    """A whole one, of no tensors."""
    path = folder / published_name(step)
    path.mkdir()
    manifest = Manifest(
        megalite="0",
        torch="0",
        trainer_state={"step": step},
        layout=Layout(),
        stage_layers=((0,),),
        model=tiny_shape(),
        config={},
        optimizer={},
        tensors={},
        files={},
    )
    (path / MANIFEST).write_text(to_json(manifest))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints after steps 10 to 50; `latest` is the last."""
    for step in range(10, 60, 10):
        checkpoint(tmp_path, step)
    write_latest(tmp_path, published_name(50))
    return tmp_path


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_the_last_ones_stay(folder: Path) -> None:
    remove_older(folder, 50, keep=2)
    assert steps(folder) == [40, 50]
    assert not list(folder.glob(".step-*"))
    remove_older(folder, 50, keep=2)
    assert steps(folder) == [40, 50]


def test_some_stay_for_good(folder: Path) -> None:
    remove_older(folder, 50, keep=1, every=20)
    assert steps(folder) == [20, 40, 50]


def test_one_that_cannot_be_removed_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == published_name(20):
            raise PermissionError(13, "Permission denied")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    remove_older(folder, 50, keep=1)
    assert steps(folder) == [20, 50]
    assert "step-000020 could not be removed (Permission denied): remove it by hand" in caplog.text


def test_what_is_named_or_spared_stays(folder: Path) -> None:
    write_best(folder, published_name(20))
    remove_older(folder, 50, keep=1, protected=[folder / published_name(10)])
    assert steps(folder) == [10, 20, 50]


def test_later_ones_of_an_abandoned_run_stay(folder: Path) -> None:
    write_latest(folder, published_name(30))
    remove_older(folder, 30, keep=1)
    assert steps(folder) == [30, 40, 50]


def test_one_that_is_not_whole_is_neither_counted_nor_removed(folder: Path) -> None:
    (folder / published_name(40) / MANIFEST).write_text("{")
    remove_older(folder, 50, keep=2)
    assert steps(folder) == [30, 40, 50]


def test_a_crash_while_one_is_removed_leaves_whole_ones_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def half(path: Path, ignore_errors: bool = False) -> None:
        if path.is_dir():
            (path / MANIFEST).unlink()
            raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(publish_module.shutil, "rmtree", half)
        remove_older(folder, 50, keep=2)
    assert steps(folder) == [20, 30, 40, 50]
    assert all(find_checkpoint(path) == path for path in folder.glob("step-*"))
    remove_stale(folder)
    assert not list(folder.glob(".step-*"))


def test_best_leads_to_its_checkpoint(folder: Path) -> None:
    assert find_best(folder) is None
    with pytest.raises(
        CheckpointError, match=r"best names no checkpoint; set checkpoint\.best = true to keep one"
    ):
        find_checkpoint(folder / BEST)
    write_best(folder, published_name(70))
    assert find_best(folder) is None
    write_best(folder, published_name(30))
    assert find_best(folder) == find_checkpoint(folder / BEST) == folder / published_name(30)
    assert find_latest(folder) == folder / published_name(50)
    shutil.rmtree(folder / published_name(30))
    with pytest.raises(CheckpointError, match=r"step-000030.* is not a checkpoint"):
        find_best(folder)
