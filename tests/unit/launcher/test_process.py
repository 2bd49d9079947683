"""Process settings requested from the system, if their effect is visible from outside."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.launcher import process
from tests.support.waiting import PATIENCE


def test_cores_follow_the_affinity_mask():
    script = """
import os
from megalite.launcher.process import available_cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(available_cores())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert (run.stdout, run.stderr) == ("1\n", "")


def test_quotas_are_read_from_both_versions_of_control_groups(tmp_path):
    for name, files in {
        "v2": {"cpu.max": "150000 100000\n"},
        "v2-free": {"cpu.max": "max 100000\n"},
        "v1": {"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"},
        "v1-free": {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"},
        "none": {},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    quotas = [process._quota(tmp_path / name) for name in ("v2", "v2-free", "v1", "v1-free", "none")]
    assert quotas == [1.5, None, 4.0, None, None]


def test_the_quota_of_every_enclosing_group_counts(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("5:memory:/elsewhere\n2:cpu,cpuacct:/jobs/17\n0::/user.slice/session\n")
    root = Path("/sys/fs/cgroup")
    folders = process._control_groups(membership, root, "cpu")
    assert [str(folder.relative_to(root)) for folder in folders] == [
        "cpu,cpuacct/jobs/17",
        "cpu,cpuacct/jobs",
        "cpu,cpuacct",
        "user.slice/session",
        "user.slice",
        ".",
    ]
    assert process._control_groups(tmp_path / "absent", root, "cpu") == []


def test_the_memory_that_a_group_has_left_counts_files_that_can_be_dropped(tmp_path):
    for name, files in {
        "v2": {
            "memory.max": "1000\n",
            "memory.current": "700\n",
            "memory.stat": "anon 1\ninactive_file 200\n",
        },
        "v2-free": {"memory.max": "max\n", "memory.current": "7\n", "memory.stat": "inactive_file 2\n"},
        "v1": {
            "memory.limit_in_bytes": "1000\n",
            "memory.usage_in_bytes": "400\n",
            "memory.stat": "total_inactive_file 100\n",
        },
        "none": {},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    left = [process._memory_left(tmp_path / name) for name in ("v2", "v2-free", "v1", "none")]
    assert left == [500, None, 700, None]
    available = process.available_memory_bytes()
    assert available is None or available > 0


def test_a_process_is_told_from_a_later_one_with_its_id():
    own = process.identity(os.getpid())
    assert own.startswith(f"{os.getpid()}.") and own == process.identity(os.getpid())
    assert own.split(".")[1] != process.identity(1).split(".")[1]


def test_children_are_seen_until_they_are_waited_for():
    child = subprocess.Popen([sys.executable, "-c", ""])
    assert child.pid in process.children()
    child.wait(timeout=PATIENCE)
    assert child.pid not in process.children()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_stays_with_the_process():
    """A large buffer allocated again costs no page faults once `keep_freed_memory` ran, and thousands before."""
    script = """
import ctypes, resource, sys
from megalite.launcher.process import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, libc.memset.argtypes = ctypes.c_void_p, [ctypes.c_void_p], [
    ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.malloc.argtypes = [ctypes.c_size_t]
kept = keep_freed_memory() if sys.argv[1] == "keep" else True
def use():
    buffer = libc.malloc(64 << 20)
    libc.memset(buffer, 1, 64 << 20)
    libc.free(buffer)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = {}
    for mode in ("keep", "return"):
        run = subprocess.run(
            [sys.executable, "-c", script, mode], capture_output=True, text=True, timeout=PATIENCE
        )
        kept, count = run.stdout.split()
        assert kept == "True", run.stderr
        faults[mode] = int(count)
    assert faults["keep"] < 100 < 10_000 < faults["return"]


def test_the_limit_of_a_control_group_is_the_memory_of_a_machine(tmp_path, monkeypatch):
    total = process.total_memory_bytes()
    for file, text, limit in (
        ("memory.max", "max\n", total),
        ("memory.max", "1000\n", 1000),
        ("memory.limit_in_bytes", "2000\n", 2000),
    ):
        group = tmp_path / f"{file}-{limit}"
        group.mkdir()
        (group / file).write_text(text)
        monkeypatch.setattr(process, "_control_groups", lambda *_, group=group: [group])
        swap = process.total_memory_bytes() - limit
        assert swap >= 0 and swap % 1024 == 0


@pytest.mark.parametrize(
    ("file", "card"), [("nvidia0", True), ("nvidia12", True), ("dxg", True), ("nvidiactl", False)]
)
def test_the_device_files_of_a_card_are_known(tmp_path, file, card):
    """WSL2 has dxg, and no nvidia0."""
    assert not process.has_accelerator(tmp_path)
    (tmp_path / file).touch()
    assert process.has_accelerator(tmp_path) is card


LEAVES = """
from megalite.launcher.process import leave_closed_terminal
import sys
input()
left = leave_closed_terminal()
print("printed", flush=True)
sys.exit(20 + left)
"""


@pytest.mark.parametrize(
    ("output", "left"), [("file", False), ("open terminal", False), ("closed terminal", True), ("pipe", True)]
)
def test_a_closed_terminal_and_pipes_are_left_and_files_go_on(tmp_path, output, left):
    """The pipe's reader is there, and may end at once."""
    log = tmp_path / "log"
    reader, writer = pty.openpty() if "terminal" in output else os.pipe()
    if output == "file":
        writer = os.open(log, os.O_WRONLY | os.O_CREAT)
    child = subprocess.Popen([sys.executable, "-c", LEAVES], stdin=subprocess.PIPE, stdout=writer)
    os.close(writer)
    if output == "closed terminal":
        os.close(reader)
    child.communicate(b"\n", timeout=PATIENCE)
    assert child.returncode == 20 + left
    if output == "file":
        assert log.read_text() == "printed\n"
    elif output == "open terminal":
        assert os.read(reader, 100) == b"printed\r\n"
    elif output == "pipe":
        assert os.read(reader, 100) == b""
