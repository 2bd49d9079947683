"""Copies in memory are the checkpoint that a save would write, survive a lost host, and count only when whole."""

import errno
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.checkpoint import unpublished
from megalite.checkpoint.copies_folder import CopiesFolder
from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.checkpoint.save import write_draft
from megalite.checkpoint.tensor_file import write_tensor_file
from megalite.train.checkpoints import memory_copies
from megalite.train.checkpoints.memory_copies import MemoryCopies
from megalite.train.checkpoints.resuming import Resumption
from megalite.train.step.train_step import TrainStep
from tests.support.ranks import RankFailed
from tests.support.tiny_run import ranks_of, tiny_trainer, write_token_files

STEPS = 3
EVERY_STEP = {"training.precision": "fp32", "checkpoint.in_memory_every": 1}
CASES: dict[str, dict[str, Any]] = {
    "tp2-average": {"parallel.tensor": 2, "optimizer.ema_decay": 0.9},
    "pp2-bf16": {"parallel.pipeline": 2, "training.precision": "bf16"},
    "zero1-dp2": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 1},
    "zero2-offload": {
        "parallel.data": 2,
        "deepspeed.zero_optimization.stage": 2,
        "deepspeed.zero_optimization.offload_optimizer.device": "cpu",
    },
    "zero3-dp2": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 3},
}


def copies_of(trainer: TrainStep, folder: Path, hosts: int) -> MemoryCopies:
    """The copies of ranks of which each `hosts`-th shares a memory: that of host n is the folder n."""
    node = f"n{trainer.mesh.rank % hosts}"
    with mock.patch.object(memory_copies, "SHARED_MEMORY", folder / node):
        (folder / node).mkdir(exist_ok=True)
        return MemoryCopies(trainer.config, trainer.mesh, node, folder / "checkpoints")


def train(folder: str, changes: dict[str, Any], hosts: int) -> None:
    """Train three steps with a copy of each, save the last two, and end as if killed."""
    trainer, _ = tiny_trainer(Path(folder), changes)
    copies = copies_of(trainer, Path(folder), hosts)
    assert copies.newest(None) is None
    with trainer.batches:
        for _ in range(STEPS):
            trainer.train_step(before_update=copies.before_update)
            assert not copies.settle() and not copies.take(trainer)
            if trainer.state.step == 2:
                write_draft(trainer.draft(Path(folder) / "older"), trainer.mesh)
        assert not copies.settle()
    write_draft(trainer.draft(Path(folder) / "saved"), trainer.mesh)


def resume(folder: str, changes: dict[str, Any], hosts: int, saved: str | None = None) -> tuple[int, bool]:
    """The step that a new start goes on from, and whether from a copy; its state is saved as `resumed`."""
    trainer, _ = tiny_trainer(Path(folder), changes)
    copies = copies_of(trainer, Path(folder), hosts)
    on_disk = None if saved is None else find_latest(Path(saved))
    start = Resumption(copies, on_disk, copies.newest(on_disk))
    start.load(trainer)
    with trainer.batches:
        write_draft(trainer.draft(Path(folder) / "resumed"), trainer.mesh)
    return trainer.state.step, start.copy is not None


def state(checkpoint: Path) -> tuple[Any, ...]:
    manifest = read_manifest(checkpoint)
    return manifest.tensors, manifest.files, manifest.optimizer, manifest.trainer_state


def whole(folder: Path) -> None:
    assert state(folder / "resumed" / "step-000003") == state(folder / "saved" / "step-000003")


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("megalite-copies-*/step-*"))


CORE = ("tp2-average", "zero3-dp2")


@pytest.mark.parametrize(
    "case", [each if each in CORE else pytest.param(each, marks=pytest.mark.extended) for each in CASES]
)
def test_a_start_goes_on_from_the_copy_as_from_a_checkpoint(ranks, tmp_path, case):
    """Bit for bit: the hashes of all tensors are those of the saved state."""
    write_token_files(tmp_path)
    changes = {**EVERY_STEP, **CASES[case]}
    ranks.run(train, world_size=ranks_of(changes), folder=str(tmp_path), changes=changes, hosts=1)
    assert steps_in(tmp_path / "n0") == ["step-000003"]
    found = ranks.run(resume, world_size=ranks_of(changes), folder=str(tmp_path), changes=changes, hosts=1)
    assert set(found) == {(3, True)}
    whole(tmp_path)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_costs_nothing(ranks, tmp_path, lost):
    """Either of two hosts has the files of the other; a new one in its place, and the one left alone, go on."""
    write_token_files(tmp_path)
    changes = {**EVERY_STEP, "parallel.data": 2, "deepspeed.zero_optimization.stage": 1}
    ranks.run(train, world_size=2, folder=str(tmp_path), changes=changes, hosts=2)
    (tmp_path / f"n{lost}").rename(tmp_path / "lost")
    assert set(ranks.run(resume, world_size=2, folder=str(tmp_path), changes=changes, hosts=2)) == {(3, True)}
    whole(tmp_path)
    alone = {**changes, "parallel.data": 1}
    if lost:
        (tmp_path / "n1").rename(tmp_path / "lost again")
        ranks.run(resume, world_size=1, folder=str(tmp_path), changes=alone, hosts=1)
        ours, theirs = (read_manifest(tmp_path / name / "step-000003") for name in ("resumed", "saved"))
        assert ours.trainer_state == theirs.trainer_state and ours.layout != theirs.layout


def test_a_host_that_cannot_keep_what_is_fetched_keeps_no_other_waiting(ranks, tmp_path):
    """Two files do not fit on the new host: the start goes on from the checkpoint."""
    write_token_files(tmp_path)
    changes = {**EVERY_STEP, "parallel.data": 2, "deepspeed.zero_optimization.stage": 1}
    ranks.run(train, world_size=2, folder=str(tmp_path), changes=changes, hosts=2)
    (tmp_path / "n1").rename(tmp_path / "lost")
    step_3 = tmp_path / "n1" / _folder(tmp_path).root.name / "step-000003"
    for rank in range(2):
        (step_3 / f".rank-{rank:05d}.safetensors.partial").mkdir(
            parents=True
        )  # where the file is to be written
    older = str(tmp_path / "older")
    found = ranks.run(resume, world_size=2, folder=str(tmp_path), changes=changes, hosts=2, saved=older)
    assert set(found) == {(2, False)}


def _folder(tmp_path: Path) -> CopiesFolder:
    [root] = (tmp_path / "n0").glob("megalite-copies-*")
    return CopiesFolder(root)


def test_a_torn_copy_does_not_count_and_altered_bytes_are_not_loaded(ranks, tmp_path):
    write_token_files(tmp_path)
    changes = {**EVERY_STEP, "parallel.data": 2}

    def resumed(**saved: str) -> set[tuple[int, bool]]:
        return set(ranks.run(resume, world_size=2, folder=str(tmp_path), changes=changes, hosts=1, **saved))

    ranks.run(train, world_size=2, folder=str(tmp_path), changes=changes, hosts=1)
    # No newer than the checkpoint: that is read.
    step_3 = _folder(tmp_path).step(3)
    kept = {path.name: path.read_bytes() for path in step_3.iterdir()}
    assert resumed(saved=str(tmp_path / "saved")) == {(3, False)}
    for name in ("rank-00001.json", "rank-00001.safetensors"):
        step_3.mkdir()
        for each, content in kept.items():
            (step_3 / each).write_bytes(content)
        assert resumed() == {(3, True)}
        (step_3 / name).unlink()
        assert resumed() == {(0, False)}
        assert not step_3.exists()
    for older, outcome in (({"saved": str(tmp_path / "older")}, {(2, False)}), ({}, None)):
        step_3.mkdir()
        for each, content in kept.items():
            flipped = content[:-1] + bytes([content[-1] ^ 1])
            (step_3 / each).write_bytes(flipped if each == "rank-00001.safetensors" else content)
        if outcome is None:
            with pytest.raises(RankFailed, match=r"sha256 differs.*\n.*the copy in memory is removed"):
                resumed(**older)
        else:
            assert resumed(**older) == outcome
        assert not step_3.exists()


def train_on_full_memory(folder: str, changes: dict[str, Any], cleared: bool) -> tuple[str, int]:
    """Train two steps; the host of rank 1 has no room for the first copy. The warning, and the copies that are left.

    cleared: instead the folder there is removed, as systemd does when the user logs out (RemoveIPC).
    """
    trainer, _ = tiny_trainer(Path(folder), changes)
    copies = copies_of(trainer, Path(folder), 2)
    full = OSError(errno.ENOSPC, "No space left on device")
    rank = trainer.mesh.rank
    with trainer.batches, mock.patch.object(unpublished, "write_tensor_file", side_effect=full) as patched:
        if rank == 0 or cleared:
            patched.side_effect = write_tensor_file
        if rank == 1 and cleared:
            shutil.rmtree(copies.folder.root)
        trainer.train_step(before_update=copies.before_update)
        assert not copies.take(trainer)
        trainer.train_step(before_update=copies.before_update)
        said = copies.settle()
    assert not copies.due(3)
    copies.close()
    return said, len(list(copies.folder.root.parent.glob("megalite-copies-*")))


@pytest.mark.parametrize(
    ("cleared", "why"),
    [
        (False, "No space left on device; enlarge it (docker --shm-size, mount -o remount,size=)"),
        (True, "No such file or directory"),
    ],
)
def test_a_host_without_room_ends_the_copies_and_not_the_run(ranks, tmp_path, cleared, why):
    """No rank waits for a file that never comes, though each sends its own to the other host."""
    write_token_files(tmp_path)
    settings = {"changes": {**EVERY_STEP, "parallel.data": 2}, "cleared": cleared}
    (said, left), other = ranks.run(train_on_full_memory, world_size=2, folder=str(tmp_path), **settings)
    assert said.startswith("no more copies in memory (checkpoint.in_memory_every): rank 1 ") and left == 0
    assert why in said
    assert other == (said, 0)
