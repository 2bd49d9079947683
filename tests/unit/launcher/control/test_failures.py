"""Which of several failures is the cause, for the exceptions that torch and the pipeline are known to raise."""

import errno
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megalite.errors import DataError, TrainingError
from megalite.launcher.control.failures import FailureFolder, FailureReport, first_cause
from megalite.launcher.control.progress import Activity, Progress, progress
from megalite.launcher.control.verdicts import describe_job, describe_own
from megalite.launcher.rank.detect import RankInfo, local_rank_infos
from megalite.topology.axes import Layout
from tests.support import reported_faults as faults
from tests.support.museum import exhibit

CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:22406"
)
RESET = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"
TIMEOUT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for recv"
)
NOT_CONNECTED = "Gloo connectFullMesh failed with [pair.cc] Connection refused"


class DistNetworkError(RuntimeError):
    """Named as torch.distributed's own."""


@pytest.fixture(autouse=True)
def after_a_collective() -> Iterator[None]:
    """The ranks are connected: a lost connection is the loss of a peer."""
    progress.restart()
    progress.finished(12)
    progress.begin(Activity.FORWARD_BACKWARD)
    progress.collective("all_reduce", "tp")
    yield
    progress.restart()


@pytest.fixture
def folder(tmp_path: Path) -> FailureFolder:
    return FailureFolder(tmp_path / "failures", Layout(2, 1, 2), job="here 17.4711")


@pytest.fixture
def info(tmp_path: Path) -> RankInfo:
    return local_rank_infos(4, tmp_path / "store")[3]


def report_of(folder: FailureFolder, info: RankInfo, error: BaseException) -> FailureReport:
    try:
        raise error
    except BaseException as raised:
        return folder.of_exception(info, raised)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CLOSED),
        RuntimeError(RESET),
        RuntimeError(TIMEOUT),
        RuntimeError("Gloo connectFullMesh failed with [...]: Connection refused"),
        DistNetworkError("The client socket has failed to connect"),
        ConnectionResetError(104, "Connection reset by peer"),
    ],
)
def test_the_loss_of_a_peer_is_secondary(folder, info, error):
    assert report_of(folder, info, error).secondary


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom"),
        RuntimeError("CUDA out of memory"),
        DistNetworkError("NCCL error: remote process exited: Cuda failure 2 'out of memory'"),
        TimeoutError("the tokenizer did not answer"),
        FileNotFoundError(2, "No such file or directory"),
        DataError("https://host: connection reset by peer while reading the corpus"),
    ],
)
def test_everything_else_is_a_cause(folder, info, error):
    assert not report_of(folder, info, error).secondary


def test_a_peer_that_comes_too_late_is_told_with_the_setting(folder, info):
    said = "RuntimeError: another rank did not join a collective within launch.collective_seconds: "
    assert report_of(folder, info, RuntimeError(TIMEOUT)).headline == said + TIMEOUT
    assert "launch." not in report_of(folder, info, RuntimeError(CLOSED)).headline
    assert "launch." not in report_of(folder, info, ValueError("timed out waiting for the corpus")).headline
    progress.begin(Activity.INFERENCE)  # generation has no such setting
    assert "launch." not in report_of(folder, info, RuntimeError(TIMEOUT)).headline


def test_an_abort_is_told_with_the_setting_by_which_nccl_aborts(folder, info):
    report = folder.of_exit(info, 1, -signal.SIGABRT, 0.0, progress)
    assert "SIGABRT" in report.headline and "launch.collective_seconds" in report.headline


def test_the_wrapping_of_a_lost_peer_is_secondary(folder, info):
    wrapped = RuntimeError("[Stage 1] failed to run forward")
    wrapped.__cause__ = RuntimeError(CLOSED)
    report = report_of(folder, info, wrapped)
    assert report.secondary and "\n" not in describe_own(report, ())


def test_an_error_for_the_user_is_not_hidden_by_its_wrapping(folder, info):
    wrapped = RuntimeError("[Stage 1] failed to run forward")
    wrapped.__cause__ = DataError("shard-3.bin: truncated")
    report = report_of(folder, info, wrapped)
    assert report.expected and (report.headline, report.exit_code) == ("shard-3.bin: truncated", 2)


def test_the_wrapping_of_a_cause_is_shown_as_raised(folder, info):
    wrapped = RuntimeError("\n    [Stage 1] failed to run forward:\n    args: many")
    wrapped.__cause__ = ValueError("boom")
    report = report_of(folder, info, wrapped)
    assert not report.secondary and report.headline == "RuntimeError: [Stage 1] failed to run forward:"
    assert describe_job([report], 4).splitlines()[1:3] == [
        "  after step 12: forward and backward, last collective: all_reduce over tp",
        "  caused by ValueError: boom",
    ]


def test_a_cause_is_not_hidden_by_a_collective_in_a_finally(folder, info):
    def step() -> None:
        try:
            raise ValueError("boom")
        finally:
            raise RuntimeError(CLOSED)

    try:
        step()
    except RuntimeError as error:
        report = folder.of_exception(info, error)
    assert not report.secondary and report.headline == "ValueError: boom"
    assert "closed by peer" in report.traceback
    assert report.frames[0].endswith("in step")


@exhibit(
    "nccl#1284",
    subject="launch",
    there="the timeout of the other ranks hid the rank that had run out of memory",
    here="the first failure that is no consequence of another is the one that is told",
    fault=faults.VICTIMS_ARE_CAUSES,
)
def test_the_first_cause_is_the_earliest_that_is_no_consequence(folder, info):
    lost = replace(report_of(folder, info, RuntimeError(CLOSED)), rank=0, time=1.0)
    boom = replace(report_of(folder, info, ValueError("boom")), rank=1, time=2.0)
    late = replace(boom, rank=2, time=3.0)
    assert first_cause([late, lost, boom]) is boom
    assert first_cause([replace(lost, rank=3, time=4.0), lost]) is lost


def test_if_all_lost_a_peer_the_error_points_outside(folder, info):
    text = describe_job([report_of(folder, info, RuntimeError(TIMEOUT))], 4)
    assert "no rank reported another cause: look at the network" in text


def test_an_error_of_one_rank_alone_has_its_coordinates_and_its_exit_code(folder, info):
    report = folder.write(report_of(folder, info, DataError("shard-3.bin: truncated")))
    assert describe_job([report], 4).splitlines() == [
        f"rank 3 (pp 1, dp 0, tp 1) on {info.node}: shard-3.bin: truncated",
        f"  full report: {folder.file_of(3)}",
        "  3 other ranks stopped because of it",
    ]
    assert report.exit_code == 2
    assert report_of(folder, info, TrainingError("loss is nan")).exit_code == 1


def test_reports_survive_writing_and_reading_and_other_jobs_are_ignored(folder, info):
    report = report_of(folder, info, ValueError("boom"))
    folder.write(report)
    folder.write(replace(report, rank=1, job="another"))
    (folder.path / "rank-00002.json").write_text("{")
    [read] = folder.read()
    assert read.traceback == report.traceback and read.coordinates == report.coordinates
    assert not list(folder.path.glob("*.partial"))
    folder.clear([3])
    assert folder.read() == [] and folder.file_of(1).exists()
    folder.clear()
    assert not list(folder.path.glob("rank-*"))


def test_a_folder_that_cannot_be_written_does_not_hide_the_failure(tmp_path, info):
    (tmp_path / "file").touch()
    folder = FailureFolder(tmp_path / "file" / "failures", Layout(2, 1, 2), job="here")
    folder.write(report_of(folder, info, ValueError("boom")))
    assert folder.read() == []


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (-9, "was killed by signal 9 (SIGKILL): the kernel's out-of-memory killer is the usual sender"),
        (-7, "was killed by signal 7 (SIGBUS): a full /dev/shm"),
        (-15, "was killed by signal 15 (SIGTERM)"),
        (-40, "was killed by signal 40"),
        (130, "was interrupted (SIGINT)"),
        (3, "ended with exit code 3 and left no report; see what it printed"),
    ],
)
def test_a_rank_that_ended_without_a_word_is_described(folder, info, exit_code, words):
    report = folder.of_exit(info, os.getpid(), exit_code, ended=1.0, progress=Progress())
    assert report.headline.startswith(words)
    assert f"on {info.node}: {words}" in describe_job([report], 4)
    name = {-9: "SIGKILL", -7: "SIGBUS", -15: "SIGTERM", -40: "40"}.get(exit_code, "")
    assert (report.signal, report.step, report.activity) == (name, None, "")


def test_a_report_has_the_place_in_the_run(folder, info):
    report = report_of(folder, info, ValueError("boom"))
    assert (report.step, report.activity, report.collective) == (
        12,
        "forward and backward",
        "all_reduce over tp",
    )
    assert (report.node, report.pid) == (info.node, os.getpid())


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (DistNetworkError("The server socket has failed to listen: EADDRINUSE"), "set MASTER_PORT to"),
        (RuntimeError(f"{NOT_CONNECTED}, remote=[127.0.1.1]:22"), "127.0.1.1 from /etc/hosts"),
        (
            RuntimeError(f"{NOT_CONNECTED}, remote=[10.0.0.3]:22"),
            "MASTER_ADDR is the address of rank 0's host",
        ),
        (DistNetworkError("No space left on device"), "or set TMPDIR to a folder on another disk"),
    ],
)
def test_before_the_first_collective_a_connection_error_is_a_cause_with_a_remedy(folder, info, error, remedy):
    progress.restart()
    progress.begin(Activity.MEETING)
    report = report_of(folder, info, error)
    assert not report.secondary and report.expected and report.exit_code == 1
    text = describe_job([report], 4)
    assert text.splitlines()[0].startswith(
        f"rank 3 (pp 1, dp 0, tp 1) on {info.node}: the ranks cannot connect to each other: {str(error)[:20]}"
    )
    assert remedy in text and "another rank" not in text


def test_a_rank_that_generates_has_no_first_step(folder, info):
    progress.restart()
    progress.begin(Activity.INFERENCE)
    progress.collective("send", "pp")
    lines = describe_job([report_of(folder, info, ValueError("boom"))], 4).splitlines()
    assert "  running inference, last collective: send over pp" in lines


def test_a_refused_connection_of_the_users_own_is_not_taken_for_one_between_ranks(folder, info):
    progress.restart()
    report = report_of(folder, info, ConnectionRefusedError(111, "Connection refused"))
    assert not report.secondary and not report.expected
    assert report.headline == "ConnectionRefusedError: [Errno 111] Connection refused"


def test_the_other_ranks_are_told_in_a_line_for_each_kind(folder, info):
    own = replace(report_of(folder, info, ValueError("boom")), time=1.0)
    lost = replace(own, rank=2, exception="", message="vanished", lost=True, time=1.25)
    alike = [replace(own, rank=rank, time=2.0) for rank in (4, 5, 6)]
    different = replace(own, rank=1, exception="KeyError", message="'x'", time=3.0)
    peer = replace(report_of(folder, info, RuntimeError(CLOSED)), rank=7)
    told = describe_job([peer, different, *alike, lost, own], 10).splitlines()[-4:]
    assert told == [
        f"  rank 2 on {info.node} vanished within 0.2 s of it",
        "  ranks 4-6 failed alike",
        f"  rank 3 (pp 1, dp 0, tp 1) on {info.node} failed too: KeyError: 'x'".replace("rank 3", "rank 1"),
        "  4 other ranks stopped because of it",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "3"},
        {"rank": True},
        {"message": None},
        {"coordinates": {"pp": "0"}},
        {"frames": "at home"},
        {"step": 1.5},
        {"node": ["n1"]},
    ],
)
def test_a_table_that_is_no_report_is_refused(folder, info, change):
    table = asdict(report_of(folder, info, ValueError("boom")))
    assert asdict(FailureReport.from_dict({**table, "unknown": 1})) == table
    with pytest.raises(ValueError, match="a failure report"):
        FailureReport.from_dict({**table, **change})
    with pytest.raises(ValueError, match="not complete"):
        FailureReport.from_dict({name: value for name, value in table.items() if name != "pid"})


def test_a_report_is_never_too_long_for_a_message(folder, info):
    report = report_of(folder, info, ValueError("tensor " * 10**6))
    assert len(report.message) + len(report.traceback) < 250_000


def test_a_full_disk_under_a_rank_is_one_line_with_a_remedy(folder, info):
    report = report_of(folder, info, OSError(errno.ENOSPC, "No space left on device", "/full/file"))
    assert report.expected and not report.frames
    assert report.headline.startswith("/full/file: No space left on device; free space there")
