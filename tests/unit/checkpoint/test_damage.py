"""Damaged checkpoints, full disks, forbidden folders, and saves killed half-way."""

import errno
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.checkpoint import tensor_file
from megalite.checkpoint.folder import find_checkpoint, find_latest
from megalite.checkpoint.publish import remove_stale, write_latest
from megalite.errors import CheckpointError
from megalite.topology.axes import Layout
from tests.support.tiny import tiny_shape
from tests.support.waiting import PATIENCE
from tests.unit.checkpoint.worlds import World

SHAPE = tiny_shape(layers=2)
WORLD = World(SHAPE, Layout(pipeline=2, tensor=2), cuts=())


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    WORLD.save(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with one checkpoint, for each test its own."""
    yield Path(shutil.copytree(pristine, tmp_path / "checkpoints"))


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def refused(checkpoint: Path, world: World = WORLD) -> str:
    """The message with which every rank alike refuses to load."""
    messages = {str(outcome) for outcome in world.load(checkpoint) if isinstance(outcome, CheckpointError)}
    assert len(messages) == 1
    return messages.pop()


def test_a_flipped_bit_in_any_tensor_is_found_and_named(folder: Path) -> None:
    checkpoint = folder / "step-000100"
    path = checkpoint / "rank-00001.safetensors"
    pristine = path.read_bytes()
    for _ in range(8):
        position = random.randrange(data_start(path), len(pristine))
        flip_bit(path, position)
        message = refused(checkpoint)
        assert f"{path}: the bytes of model." in message
        start, stop = map(int, re.findall(r"bytes (\d+) to (\d+) of the file", message)[0])
        assert start <= position < stop
        path.write_bytes(pristine)
    WORLD.assert_loaded(WORLD.load(checkpoint))


def test_a_flipped_bit_in_a_header_is_refused(folder: Path) -> None:
    path = folder / "step-000100" / "rank-00001.safetensors"
    pristine = path.read_bytes()
    for position in (3, 9, 40, data_start(path) - 20):
        flip_bit(path, position)
        assert str(path) in refused(folder / "step-000100")
        path.write_bytes(pristine)


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused_and_named(folder: Path, keep: float) -> None:
    path = folder / "step-000100" / "rank-00002.safetensors"
    os.truncate(path, int(keep * path.stat().st_size))
    message = refused(folder / "step-000100")
    assert str(path) in message and "bytes instead of" in message
    if keep > 0.1:  # the header is whole
        cut = f"but the file ends at {path.stat().st_size}: it was cut short"
        assert re.search(r"\S+/\S+ should end at byte \d+, " + cut, message)


def test_the_newest_whole_checkpoint_is_found_when_latest_is_not(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    WORLD.save(folder, step=150)
    with caplog.at_level(logging.WARNING):
        assert find_latest(folder) == folder / "step-000150"
        assert not caplog.records
        (folder / "latest").unlink()
        assert find_latest(folder) == folder / "step-000150"
        assert "latest is missing" in caplog.text
        (folder / "step-000150" / "rank-00000.safetensors").unlink()
        assert find_latest(folder) == folder / "step-000100"
        assert (
            "skipping a broken checkpoint" in caplog.text
            and "rank-00000.safetensors is missing" in caplog.text
        )
        for name in ("step-000150", "step-000777", "", "../..", "\0"):
            write_latest(folder, name)
            assert find_latest(folder) == folder / "step-000100"
        assert "names a broken checkpoint: step-000777 does not exist; using" in caplog.text
        assert "name another folder" not in caplog.text
        assert len(set(caplog.messages)) == len(caplog.messages), "a process says each of them once"
    shutil.rmtree(folder / "step-000100")
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        find_latest(folder)


def test_leftovers_go_but_never_what_latest_names(folder: Path) -> None:
    left, named = folder / ".step-000150.partial-0a1b", folder / ".step-000100.partial-2c3d"
    left.mkdir()
    # A save that was to replace step 100 and was killed before the new one had its name.
    (folder / "step-000100").rename(named)
    write_latest(folder, named.name)
    assert find_latest(folder) == named
    remove_stale(folder)
    assert find_latest(folder) == named and not left.exists()
    named.rename(folder / "step-000100")
    assert find_latest(folder) == folder / "step-000100"


def test_a_run_s_folder_leads_to_its_checkpoint(folder: Path) -> None:
    checkpoint = folder / "step-000100"
    for path in (checkpoint, folder, folder.parent):
        assert find_checkpoint(path) == checkpoint
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        find_checkpoint(folder.parent / "nowhere")
    other = folder.parent / "model"
    other.mkdir()
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json$"):
        find_checkpoint(other)
    (other / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json; .*megalite convert import"):
        find_checkpoint(other)


def failing_write(monkeypatch: pytest.MonkeyPatch, number: int, calls: int) -> None:
    """Writing fails for the rank that makes the `calls`-th fsync, as on a full disk."""
    real, lock, count = os.fsync, threading.Lock(), [0]

    def fsync(handle: int) -> None:
        with lock:
            count[0] += 1
            if count[0] == calls:
                raise OSError(number, os.strerror(number))
        real(handle)

    monkeypatch.setattr(tensor_file.os, "fsync", fsync)


@pytest.mark.parametrize("calls", range(1, 10))
def test_a_full_disk_ends_the_save_on_all_ranks_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    failing_write(monkeypatch, errno.ENOSPC, calls)
    outcomes = WORLD.save(folder, step=150)
    monkeypatch.undo()
    if not isinstance(outcomes[0], CheckpointError):
        pytest.skip(f"a save syncs fewer than {calls} times")
    [message] = {str(outcome) for outcome in outcomes}
    assert "rank " in message and ".step-000150.partial-" in message and "No space left on device" in message
    assert "free space there" in message
    left = {path.name for path in folder.iterdir()}
    # Once the folder has its name it is whole, though `latest` may still be the older one.
    assert left in (
        {"latest", "step-000100"},
        {"latest", "step-000100", "step-000150"},
        {"latest", "step-000100", "step-000150", ".latest.new"},
    )
    WORLD.assert_loaded(WORLD.load(find_latest(folder)))
    WORLD.save(folder, step=150)
    assert find_latest(folder) == folder / "step-000150"
    WORLD.assert_loaded(WORLD.load(folder / "step-000150"))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EFBIG, "raise the limit of file sizes (ulimit -f unlimited)"),
        (errno.EROFS, "make it writable or set run.folder"),
    ],
)
def test_a_save_that_cannot_write_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    failing_write(monkeypatch, number, 1)
    for outcome in WORLD.save(folder, step=150):
        assert isinstance(outcome, CheckpointError)
        assert f"{os.strerror(number)}; {remedy}" in str(outcome)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_really_full_disk_is_reported(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        for outcome in World(SHAPE, Layout(data=2)).save(tmp_path):
            assert isinstance(outcome, CheckpointError)
            assert "No space left on device" in str(outcome) and "rank" in str(outcome)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_made_is_reported_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for outcome in WORLD.save(tmp_path / "file" / "checkpoints"):
        assert isinstance(outcome, CheckpointError)
        assert "rank 0 (pp 0, dp 0, tp 0) could not prepare" in str(outcome)


def test_a_bug_on_one_rank_ends_the_save_on_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tensor_file.tensor_bytes

    def tensor_bytes(tensor: object) -> memoryview:
        if threading.current_thread().name == "rank 3":
            raise ValueError("a bug")
        return real(tensor)  # type: ignore[arg-type]

    monkeypatch.setattr(tensor_file, "tensor_bytes", tensor_bytes)
    [message] = {str(outcome) for outcome in WORLD.save(folder, step=150)}
    assert message.startswith("rank 3 (pp 1, dp 0, tp 1) could not write")
    assert message.endswith("ValueError: a bug")
    assert find_latest(folder) == folder / "step-000100"
    assert {path.name for path in folder.iterdir()} == {"latest", "step-000100"}


KILLED = """
import os, shutil, sys
from pathlib import Path
import torch
from megalite.checkpoint import tensor_file
from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.topology.axes import Layout
from tests.support.tiny import tiny_shape
from tests.unit.checkpoint.worlds import World

torch.set_num_threads(1)
root = Path(sys.argv[1])
world = World(tiny_shape(layers=1), Layout(), cuts=())
changes = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}

def save_and_die_at(folder, event, version):
    count, tensors = 0, 0
    def tick():
        nonlocal count
        count += 1
        if count == event:
            os._exit(9)
    def hook(name, arguments):
        if name in changes and (name != "open" or (isinstance(arguments[1], str) and "w" in arguments[1])):
            tick()
    fsync, tensor_bytes = os.fsync, tensor_file.tensor_bytes
    def ticking_fsync(handle):
        tick()
        fsync(handle)
    def ticking_bytes(tensor):
        nonlocal tensors
        tensors += 1
        if tensors % 12 == 1:
            tick()
        return tensor_bytes(tensor)
    os.fsync, tensor_file.tensor_bytes = ticking_fsync, ticking_bytes
    sys.addaudithook(hook)
    [outcome] = world.save(folder, step=100, version=version)
    os._exit(0 if isinstance(outcome, Path) else 1)

def holds_one_of(path, versions):
    for version in versions:
        try:
            world.assert_loaded(world.load(path), version=version)
            return True
        except AssertionError:
            pass
    return False

def die_at_every_event(mode):
    old, new = (1, 2) if mode == "replaced" else (0, 0)
    before, folder, event = root / f"{mode}-before", root / mode, 0
    before.mkdir()
    if mode != "first":
        world.save(before, step=50, version=old)
    if mode in ("again", "replaced"):
        world.save(before, step=100, version=old)
    if mode == "again":
        (before / "latest").write_text("step-000050")
    while True:
        event += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        child = os.fork()
        if child == 0:
            save_and_die_at(folder, event, new)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9), code
        found = find_latest(folder)
        assert found is not None or (mode == "first" and code == 9), (mode, event)
        if found is not None:
            step = read_manifest(found).step
            assert step == 100 or code == 9
            versions = {50: (old,), 100: (new,) if code == 0 else (new, old)}[step]
            assert holds_one_of(found, versions), (mode, event, found)
        # The run goes on: it saves the same step again, and nothing of the killed save is left.
        [path] = world.save(folder, step=100, version=new)
        assert find_latest(folder) == path == folder / "step-000100"
        assert holds_one_of(path, (new,))
        assert not list(folder.glob(".step*")), list(folder.iterdir())
        if code == 0:
            return event - 1

for mode in ("first", "next", "again", "replaced"):
    print(mode, die_at_every_event(mode))
"""


@pytest.mark.extended
def test_a_save_killed_at_any_moment_never_breaks_latest(tmp_path: Path) -> None:
    """Die at every file operation in turn, and between tensors.

    The save is the folder's first, its next, one of a step that is there but not named by `latest`, or one that
    replaces the step that `latest` names.
    """
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    assert "broken" not in result.stderr
    deaths = dict(line.split() for line in result.stdout.splitlines())
    assert all(int(count) > 12 for count in deaths.values()) and len(deaths) == 4, deaths
