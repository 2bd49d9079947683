"""Saving beside the training: whole and of its moment, or an error on every rank, and never in each other's way."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import save as save_module
from megalite.checkpoint import tensor_file, unpublished
from megalite.checkpoint.background import BackgroundWriter, Written
from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.checkpoint.save import RunRecord, draft_checkpoint
from megalite.checkpoint.staging import Staging
from megalite.errors import CheckpointError
from megalite.topology.axes import Layout
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.tiny import tiny_shape
from tests.unit.checkpoint.worlds import HeldStage, HeldState, ThreadMesh, World, on_all_ranks

WORLD = World(tiny_shape(layers=2), Layout(pipeline=2, tensor=2))


class Rank:
    """One that trains: its numbers, and a writer."""

    def __init__(self, mesh: ThreadMesh, folder: Path):
        self.mesh, self.folder = mesh, folder
        self.stage: HeldStage
        self.state: HeldState
        self.stage, self.state = WORLD.held(mesh, version=0)
        self.writer = BackgroundWriter(mesh)  # type: ignore[arg-type]

    def start(self, step: int, then: Callable[[], None] = lambda: None) -> None:
        record = RunRecord({"step": step, "samples": 8 * step, "tokens": 96 * step}, {})
        draft = draft_checkpoint(self.folder, WORLD.replica(self.mesh, self.stage), self.state, record)
        self.writer.start(draft, then)

    def update(self) -> None:
        """As an optimizer does: everything changes, in place."""
        self.writer.before_update()
        for tensor in [*self.stage.tensors.values(), *self.state.locals.values()]:
            tensor.fill_(torch.nan)


def on_ranks(folder: Path, action: Callable[[Rank], Any]) -> list[Any]:
    return on_all_ranks(WORLD.layout, lambda mesh: action(Rank(mesh, folder)))


def test_what_is_written_is_what_was_there_when_the_save_began(tmp_path: Path) -> None:
    def train(rank: Rank) -> Written | None:
        rank.start(100)
        rank.update()
        return rank.writer.finish()

    outcomes = on_ranks(tmp_path, train)
    assert [each.path for each in outcomes] == [tmp_path / "step-000100"] * 4
    assert outcomes[0].step == 100 and outcomes[0].staging_bytes > 0 and outcomes[0].write_seconds > 0
    assert find_latest(tmp_path) == tmp_path / "step-000100"
    WORLD.assert_loaded(WORLD.load(tmp_path / "step-000100"))
    WORLD.save(tmp_path / "waiting")
    written, expected = (read_manifest(folder / "step-000100") for folder in (tmp_path, tmp_path / "waiting"))
    assert (written.tensors, written.files) == (expected.tensors, expected.files)


def test_it_is_published_between_two_steps_once_all_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are done go on; the one whose disk is slow holds the publishing back, and nothing else."""
    slow, real = threading.Event(), tensor_file.write_tensor_file

    def write_tensor_file(path: Path, *arguments: Any) -> Any:
        if path.name == "rank-00003.safetensors":
            assert slow.wait(20)
        return real(path, *arguments)

    monkeypatch.setattr(unpublished, "write_tensor_file", write_tensor_file)

    def boundary(rank: Rank) -> Written | None:
        busy = bool(rank.mesh.max_over_world(float(rank.writer.busy)))
        return rank.writer.advance(busy=busy, failed=False)

    def train(rank: Rank) -> int:
        rank.start(100)
        for _ in range(3):
            rank.update()
            assert boundary(rank) is None and rank.writer.in_flight
        assert not (tmp_path / "step-000100").exists()
        slow.set()
        more = 0
        while (done := boundary(rank)) is None:
            more += 1
        assert (tmp_path / "step-000100" / "manifest.json").exists() and not rank.writer.in_flight
        assert done.step == 100
        return more

    assert len({*on_ranks(tmp_path, train)}) == 1  # every rank after the same step
    WORLD.assert_loaded(WORLD.load(tmp_path / "step-000100"))


@exhibit(
    "axolotl PR#3709",
    also=("axolotl PR#3635",),
    subject="checkpoints",
    there="the memory of a run grew with each save",
    here="all saves are staged in the same memory",
    fault=faults.STAGING_GROWS,
)
def test_one_after_the_other_in_the_same_memory(tmp_path: Path) -> None:
    def train(rank: Rank) -> int:
        held = set()
        for step in (100, 200, 300):
            rank.start(step)
            rank.writer.before_update()
            rank.writer.finish()
            held.add(rank.writer.staging_bytes)
        [size] = held
        return size

    sizes = on_ranks(tmp_path, train)
    assert all(isinstance(size, int) for size in sizes), sizes
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        f"step-000{step}" for step in (100, 200, 300)
    ]
    files = list((tmp_path / "step-000300").glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files)
    assert sum(sizes) == sum(path.stat().st_size for path in files) - headers


@pytest.mark.parametrize("calls", range(1, 10))
def test_a_disk_that_is_full_ends_the_run_on_all_ranks_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    WORLD.save(tmp_path, step=50)
    real, lock, count = os.fsync, threading.Lock(), [0]

    def fsync(handle: int) -> None:
        with lock:
            count[0] += 1
            if count[0] == calls:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(tensor_file.os, "fsync", fsync)

    def train(rank: Rank) -> Any:
        rank.start(100)
        rank.update()
        return rank.writer.finish()

    outcomes = on_ranks(tmp_path, train)
    monkeypatch.undo()
    if not isinstance(outcomes[0], CheckpointError):
        assert calls > 8  # a save syncs each of four files, manifest, two folders and `latest`
        return
    [message] = {str(outcome) for outcome in outcomes}
    assert "rank " in message and "No space left on device" in message and "free space there" in message
    assert not list(tmp_path.glob(".step-*"))
    WORLD.assert_loaded(WORLD.load(find_latest(tmp_path) or tmp_path))
    WORLD.assert_loaded(WORLD.load(tmp_path / "step-000050"))


def test_what_follows_the_publishing_is_done_by_rank_0_and_its_failure_told(tmp_path: Path) -> None:
    tidied: list[int] = []

    def train(rank: Rank) -> Any:
        def tidy() -> None:
            tidied.append(rank.mesh.rank)
            raise PermissionError(errno.EACCES, "Permission denied")

        rank.start(100, tidy)
        return rank.writer.finish()

    [message] = {str(outcome) for outcome in on_ranks(tmp_path, train)}
    assert tidied == [0]
    assert message.startswith("rank 0 (pp 0, dp 0, tp 0) could not publish")
    assert "make it writable or set run.folder to a folder that is" in message
    WORLD.assert_loaded(WORLD.load(tmp_path / "step-000100"))


def test_a_copy_holds_every_type_and_shape() -> None:
    tensors = {
        "wide": torch.randn(3, 5, dtype=torch.float64),
        "narrow": torch.randn(7).bfloat16(),
        "none": torch.empty(0),
        "turned": torch.randn(4, 6).t(),
        "one": torch.randn(1, 1, 1).half(),
    }
    staging = Staging()
    for _ in range(2):
        copies = staging.begin(tensors)
        staging.fill()
        staging.wait_for_device()
        staging.hold_update()
        assert all(torch.equal(copies[key], tensor) for key, tensor in tensors.items())
        assert all(copies[key].dtype == tensor.dtype for key, tensor in tensors.items())
    assert staging.size_bytes == Staging.needed_bytes(tensors) < 600


def test_a_checkpoint_without_room_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WORLD.save(tmp_path, step=50)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(save_module.shutil, "disk_usage", lambda path: usage)
    [message] = {str(outcome) for outcome in WORLD.save(tmp_path, step=100)}
    assert f"could not prepare {tmp_path}: No space left on device: the checkpoint has " in message
    assert "bytes, and 1,000 are free; free space there, set checkpoint.keep_last" in message
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-000050"}
