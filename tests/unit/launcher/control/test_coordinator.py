"""Ranks that meet, agree, wait, fail and leave: a coordinator and its members in one process, on the loopback."""

import errno
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict

import pytest

from megalite.errors import LaunchError
from megalite.launcher.control import coordinator, member
from megalite.launcher.control.connection import (
    RendezvousLimits,
    alive_seconds,
    host_answers,
    require_files,
    why_lost,
)
from megalite.launcher.control.coordinator import Coordinator
from megalite.launcher.control.failures import FailureReport
from megalite.launcher.control.member import JobEnded, Member, NotJoined, RankCalls
from megalite.launcher.control.messages import (
    LINE_BYTES,
    Hello,
    LineReader,
    MessageError,
    Verdict,
    decode,
    encode,
)
from megalite.launcher.control.rank_states import CoordinatedJob, RankState
from megalite.launcher.control.verdicts import report_from
from megalite.topology.axes import Layout
from tests.support.members import break_off
from tests.support.waiting import PATIENCE, soon, wait_until

LIMITS = ("rendezvous_seconds", "heartbeat_seconds")


class Job:
    """A coordinator, and the members that joined it."""

    def __init__(self, ranks: int, **settings):
        listener = socket.create_server(("127.0.0.1", 0))
        self.said: list[str] = []
        layout = Layout(tensor=1, pipeline=1, data=ranks)
        limits = RendezvousLimits(**{name: settings.pop(name) for name in LIMITS if name in settings})
        job = CoordinatedJob(ranks, settings.pop("job", ""), layout=layout, **settings)
        self.coordinator = Coordinator(listener, job, limits, say=self.said.append)
        self.address = self.coordinator.address
        self.members: list[Member] = []
        self.coordinator.start()

    def join(
        self, rank: int, *, host: str = "", pid: int = 0, seconds: float = PATIENCE, **settings
    ) -> Member:
        hello = Hello(
            rank=rank,
            world_size=settings.pop("world_size", self.coordinator.world_size),
            host=host or f"n{rank // 2}",
            pid=pid or 1000 + rank,
            job=settings.pop("job", ""),
        )
        nonce = settings.pop("nonce", "")
        heartbeat_seconds = settings.pop("heartbeat_seconds", RendezvousLimits.heartbeat_seconds)
        limits, calls = RendezvousLimits(seconds, heartbeat_seconds), RankCalls(**settings)
        self.members.append(Member.join(lambda: (*self.address, nonce), hello, limits, calls))
        return self.members[-1]

    def join_all(self, **settings) -> list[Member]:
        return [self.join(rank, **settings) for rank in range(self.coordinator.world_size)]


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start_job(ranks: int, **settings) -> Job:
        jobs.append(Job(ranks, **settings))
        return jobs[-1]

    yield start_job
    for job in jobs:
        for each in job.members:
            each.leave()
        job.coordinator.stop()
        assert job.coordinator.join(PATIENCE)


def together(*calls: Callable[[], object]) -> list[object]:
    """Run the calls at the same time; return their results, or the errors that they raised."""
    results: list[object] = [None] * len(calls)

    def run(place: int, call: Callable[[], object]) -> None:
        try:
            results[place] = call()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results


def report(rank: int, **fields) -> FailureReport:
    given = {
        "coordinates": {},
        "node": "n0",
        "pid": 1,
        "job": "",
        "time": time.time(),
        "exception": "ValueError",
    }
    return FailureReport(rank=rank, **{**given, "message": "the moon", **fields})


def test_ranks_agree_wait_for_a_value_and_leave(start):
    job = start(4)
    members = job.join_all()
    facts = {"config: run.seed": "1"}
    together(*(lambda each=each: each.agree("start", facts, "the same") for each in members))
    waiting = threading.Thread(target=lambda: seen.append(members[3].wait("store")))
    seen: list[object] = []
    waiting.start()
    members[0].announce("store", ["10.0.0.1", 5000])
    waiting.join(PATIENCE)
    assert seen == [["10.0.0.1", 5000]]
    for each in members:
        each.leave()
    assert job.coordinator.join(PATIENCE)
    assert job.coordinator.verdict is None
    assert not job.said


def test_differing_facts_end_the_job_with_each_value_and_its_hosts(start):
    job = start(4)
    members = job.join_all()
    facts = [
        {"optimizer.learning_rate": "0.003" if rank > 1 else "0.001", "run.seed": "1"} for rank in range(4)
    ]
    ended = together(
        *(
            lambda each=each, fact=fact: each.agree("start", fact, "copy the run file")
            for each, fact in zip(members, facts, strict=True)
        )
    )
    text = "copy the run file\n  optimizer.learning_rate: 0.001 on n0 (ranks 0-1), 0.003 on n1 (ranks 2-3)"
    assert [str(each) for each in ended] == [text] * 4
    assert all(isinstance(each, JobEnded) and each.exit_code == 2 for each in ended)


def test_a_rank_without_facts_has_no_part_in_a_comparison(start):
    members = start(2).join_all()
    results = together(
        lambda: members[0].agree("files", {"train.bin": "7 bytes"}, ""),
        lambda: members[1].agree("files", {}, ""),
    )
    assert results == [None, None]


def test_missing_ranks_are_named_and_waited_for_within_bounds(start, monkeypatch):
    monkeypatch.setattr(coordinator, "WAITING_SECONDS", 0.05)
    job = start(4, rendezvous_seconds=0.4, hosts=["n0", "n0", "n1", "n1"])
    job.coordinator._pause = lambda: 0.02
    first = job.join(0)
    with pytest.raises(
        JobEnded, match=r"ranks 1-3 on hosts n0, n1 did not arrive within 0\.4 s \(launch\.rend"
    ):
        first.wait("store")
    assert any("waiting for ranks 1-3 on hosts n0, n1 (0 s); here: rank 0 on n0" in line for line in job.said)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"nonce": "of another start"}, "another job is at work there"),
        ({"job": "1234.1"}, "another job is at work there"),
        ({"world_size": 8}, "the job there has 2 ranks, this one has 8"),
    ],
)
def test_a_rank_of_another_job_is_refused_and_disturbs_nobody(start, settings, reason):
    job = start(2, nonce="fresh", job="1234.0")
    with pytest.raises(NotJoined, match=f"rank 1 on n0 did not reach .* within 0 s .*{reason}"):
        job.join(1, seconds=0, **{"nonce": "fresh", "job": "1234.0", **settings})
    members = job.join_all(nonce="fresh", job="1234.0")
    assert (
        together(*(lambda each=each: each.agree("start", {"a": "1"}, "") for each in members)) == [None] * 2
    )


def test_a_rank_that_is_started_twice_names_both_processes(start):
    job = start(2)
    job.join(0, host="n0", pid=11)
    with pytest.raises(NotJoined, match="rank 0 was started twice: pid 11 on n0 and pid 22 on n1"):
        job.join(0, host="n1", pid=22)
    assert any("pid 11 on n0 and pid 22 on n1" in line for line in job.said)


def test_a_late_process_is_refused_once_all_ranks_are_present(start):
    job = start(2)
    job.join_all()
    with pytest.raises(NotJoined, match="all ranks of the job there are present"):
        job.join(1, seconds=0)


NOISE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "no hello": encode("leave"),
    "a field is missing": b'{"kind": "hello", "rank": 1}\n',
    "true for a number": encode("hello", job="", nonce="", rank=True, world_size=2, host="", pid=1),
    "deep": b"[" * 100_000 + b"\n",
    "long": b" " * (LINE_BYTES + 2),
    "not utf-8": b"\xff\xfe\n",
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_noise_closes_its_own_connection_only(start, noise):
    job = start(2)
    members = job.join_all()
    with socket.create_connection(job.address, timeout=PATIENCE) as stranger:
        stranger.sendall(noise)
        # A close with unread bytes resets the connection.
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert (
        together(*(lambda each=each: each.agree("start", {"a": "1"}, "") for each in members)) == [None] * 2
    )


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"1",
        b"{}",
        b'{"kind": 1}',
        b'{"kind": "facts", "name": "a", "about": "", "facts": {"a": 1}}',
        b"[" * 9999,
    ],
)
def test_a_malformed_line_is_a_message_error(line):
    with pytest.raises(MessageError):
        decode(line)


@pytest.mark.parametrize("facts", ["", "1", "[]", '{"a": 1}', "[" * 9999], ids=range(5))
def test_facts_that_are_no_table_of_texts_close_the_connection(start, facts):
    job = start(2)
    members = job.join_all()
    members[1]._socket.sendall(encode("facts", name="start", about="", facts=facts))
    wait_until(lambda: job.coordinator.verdict, "nobody was told")
    assert "rank 1" in job.coordinator.verdict.text and "facts: no table" in job.coordinator.verdict.text


def test_only_a_rank_that_asks_is_told_the_hosts_once_all_are_here(start):
    job = start(4)
    first = job.join(0)
    asked = threading.Thread(target=lambda: seen.append(first.hosts()))
    seen: list[list[str]] = []
    asked.start()
    others = [job.join(rank, host="n1" if rank == 1 else "n0") for rank in (1, 2, 3)]
    asked.join(PATIENCE)
    assert seen == [["n0", "n1", "n0", "n0"]]
    assert others[-1].hosts() == seen[0]
    first.announce("store", 1)
    assert others[0].wait("store") == 1


def test_the_ranks_of_a_large_job_say_less_often_that_they_are_alive():
    assert [alive_seconds(ranks) for ranks in (1, 4000, 131072)] == [2, 2, 65.536]


def test_a_coordinator_that_may_not_open_a_connection_to_each_rank_says_so_at_once(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: (_ for _ in ()).throw(ValueError))
    require_files(600)
    with pytest.raises(
        LaunchError, match=r"16,740 open files, but this process may have 4,096; raise the limit"
    ):
        require_files(16384)


def test_lines_are_put_together_from_pieces():
    line, reader = encode("announce", name="store", value={"a": [1, None]}), LineReader()
    pieces = [reader.feed(line[place : place + 1]) for place in range(len(line))]
    assert [each for piece in pieces for each in piece] == [
        {"kind": "announce", "name": "store", "value": {"a": [1, None]}}
    ]


def test_a_rank_that_vanishes_ends_the_others_with_its_last_step(start):
    job, ended = start(4), list[Verdict]()
    members = [
        job.join(rank, ended=ended.append, progress=lambda: {"step": 12, "activity": "saving"})
        for rank in range(4)
    ]
    wait_until(
        lambda: all(state.step == 12 for state in job.coordinator.ranks.values()),
        "not every rank told its step",
    )
    began = time.monotonic()
    break_off(members[3])
    wait_until(lambda: len(ended) == 3, "not every rank was told the verdict")
    assert time.monotonic() - began < soon()
    [verdict] = set(ended)
    assert (verdict.rank, verdict.host) == (3, "n1")
    assert verdict.text == (
        "rank 3 (pp 0, dp 3, tp 0) on n1: vanished (pid 1003): killed, out of memory, or its host is gone\n"
        "  last seen after step 12: saving\n  3 other ranks stopped because of it"
    )


def test_the_waits_for_earlier_causes_are_within_the_two_seconds_that_the_pages_promise():
    assert 0 < coordinator._PRIMARY_SECONDS < coordinator._SECONDARY_SECONDS <= 2


def test_the_first_cause_is_told_although_its_consequence_is_reported_before(start):
    job, ended = start(3), list[Verdict]()
    members = [job.join(rank, ended=ended.append) for rank in range(3)]
    now = time.time()
    verdicts = together(
        lambda: members[1].fail(report(1, secondary=True, message="connection reset by peer", time=now - 1)),
        lambda: time.sleep(0.2) or members[2].fail(report(2, message="the moon", time=now)),
    )
    assert [verdict.rank for verdict in verdicts] == [2, 2]
    assert "ValueError: the moon" in verdicts[0].text
    wait_until(lambda: len(ended) == 1, "the rank that did not fail was not told")
    assert job.coordinator.verdict == verdicts[0]


def test_a_failure_is_dated_by_the_clock_of_the_coordinator():
    clock = 1000.0  # of a host whose clock is years late
    sent = {"report": asdict(report(1, time=clock)), "sent": clock + 2}
    assert round((time.time() - report_from(sent).time) / 10, 0) == 0


@pytest.mark.parametrize("sent", [{}, {"rank": "one"}, {"rank": 1, "time": "now"}, {"rank": 1, "time": []}])
def test_a_malformed_report_is_a_message_error(sent):
    with pytest.raises(MessageError):
        report_from({"report": sent, "sent": 1.0})


def test_an_orderly_stop_reaches_all_ranks(start):
    job, ended = start(2), list[Verdict]()
    members = [job.join(rank, ended=ended.append) for rank in range(2)]
    assert members[1].stop("stopped before the first step", 75) == Verdict(
        "stopped before the first step", 75, 1, "n0"
    )
    wait_until(lambda: ended, "the other rank was not stopped")
    assert ended[0].exit_code == 75


def test_a_signal_is_passed_on_to_all_ranks(start, monkeypatch):
    job, sent = start(2), list[tuple[int, int]]()
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    job.join_all()
    job.coordinator.signal(signal.SIGUSR1)
    wait_until(lambda: len(sent) == 2, "the signal did not reach both ranks")
    job.coordinator.signal(signal.SIGKILL)
    wait_until(lambda: job.members[0].verdict, "the second signal did not end the job")
    assert sent == [(os.getpid(), signal.SIGUSR1)] * 2
    assert "number" in job.members[0].verdict.text


def test_another_thread_ends_the_job_before_a_rank_came_and_after(start):
    job, ended = start(2), list[Verdict]()
    job.join(0, ended=ended.append)
    job.coordinator.end(Verdict("srun ended with exit code 1", 1))
    wait_until(lambda: ended, "the rank was not told the end")
    assert ended[0].text == "srun ended with exit code 1"
    with pytest.raises(JobEnded, match="srun ended with exit code 1"):
        job.join(1, seconds=0).wait("store")


def test_a_rank_leaves_with_its_exit_code(start):
    job = start(2)
    for each, code in zip(job.join_all(), (0, 75), strict=True):
        each.leave(code)
    assert job.coordinator.join(PATIENCE)
    assert [job.coordinator.ranks[rank].exit_code for rank in range(2)] == [0, 75]


def test_ranks_notice_the_loss_of_the_coordinator(start):
    job, ended = start(2), list[Verdict]()
    job.join_all(ended=ended.append)
    job.coordinator.stop()
    wait_until(lambda: len(ended) == 2, "not both ranks noticed it")
    assert "the coordinator of the job at 127.0.0.1 vanished" in ended[0].text


def test_a_silent_rank_is_named_and_no_failure(start):
    job = start(1, heartbeat_seconds=0.05)
    job.coordinator._pause = lambda: 0.02
    job.join(0)
    wait_until(lambda: job.said, "the silence was not told")
    assert "rank 0 (pp 0, dp 0, tp 0) on n0 has been silent" in job.said[0]
    assert job.coordinator.verdict is None


def test_ranks_that_were_just_heard_need_no_look_at_the_connections():
    """With one look for each rank, every wake-up of a large job would take ranks x ranks steps."""

    class Connections(list):
        def __iter__(self):
            pytest.fail("the connections were searched")

    coordinator_ = Coordinator(socket.create_server(("127.0.0.1", 0)), CoordinatedJob(2), say=pytest.fail)
    coordinator_._connections = Connections()
    coordinator_.ranks |= {rank: RankState("n0", 1, time.time()) for rank in range(2)}
    coordinator_._watch_silence()


def test_rank_1_says_that_the_coordinator_is_silent(monkeypatch):
    monkeypatch.setattr(member, "alive_seconds", lambda _: 0.1)
    said = list[str]()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def join() -> None:
            place, hello = (*server.getsockname(), ""), Hello(1, 2, "n0", 1000)
            limits, calls = RendezvousLimits(heartbeat_seconds=2.5), RankCalls(say=said.append)
            Member.join(lambda: place, hello, limits, calls)

        joining = threading.Thread(target=join)
        joining.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(encode("joined", address="127.0.0.1"))
            joining.join()
            wait_until(lambda: bool(said), "rank 1 does not speak")
    assert "the coordinator of the job at 127.0.0.1 has been silent for " in said[0]


def test_a_coordinator_answers_each_sign_of_life(start):
    job = start(1)
    connection = socket.create_connection(job.address)
    with connection:
        connection.sendall(encode("hello", **asdict(Hello(0, 1, "n0", 1000))))
        connection.sendall(encode("alive", step=None, activity="", marks={}))
        reader, kinds = LineReader(), list[str]()
        while "heard" not in kinds:
            kinds += [message["kind"] for message in reader.feed(connection.recv(2**16))]
    assert kinds == ["joined", "heard"]


@pytest.mark.parametrize("answers", [True, False, None])
def test_a_silent_ranks_host_is_said_to_answer_only_if_it_does(start, monkeypatch, answers):
    monkeypatch.setattr(coordinator, "host_answers", lambda connection, seconds: answers)
    job = start(2, heartbeat_seconds=0.05)
    job.coordinator._pause = lambda: 0.02
    silent, other = job.join_all()
    # Several looks at the silence.
    for name in ("a", "b", "c"):
        other.announce(name, None)
        silent.wait(name)
        time.sleep(0.05)
    lines = [line for line in job.said if "rank 0 " in line]
    assert len(lines) == (answers is not False)
    if lines:
        assert (", though its host answers: the process is stopped" in lines[0]) is bool(answers)
        assert lines[0].endswith(", or its host is gone") is (answers is None)


def test_the_kernel_tells_whether_the_other_host_answers(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
    assert host_answers(connection, 30) is True
    # The host has not answered within the last 0 s.
    monkeypatch.setattr("megalite.launcher.control.connection._pause_of_probes", lambda seconds: 0)
    assert host_answers(connection, 30) is False
    connection.close()
    assert host_answers(connection, 30) is None


def test_the_kernel_of_each_side_waits_the_heartbeat_seconds_of_that_side_for_an_answer(start):
    job = start(1, heartbeat_seconds=8)
    member_ = job.join(0, heartbeat_seconds=7)
    [connection] = job.coordinator._connections
    sockets = (member_._socket, connection.socket)
    limits = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for each in sockets]
    assert limits == [7000, 8000]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "killed, out of memory, or its host is gone"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "killed, out of memory, or its host is gone"),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), "its host or the network to it is gone (timed out)"),
        (OSError(errno.EHOSTUNREACH, "no route"), "its host or the network to it is gone (no route)"),
    ],
)
def test_only_a_host_that_does_not_answer_is_said_to_be_gone(error, said):
    assert why_lost(error) == said


def test_a_rank_that_sends_nonsense_is_not_taken_for_a_lost_host(start):
    job = start(2)
    job.join_all()[1]._socket.sendall(b"nonsense\n")
    wait_until(lambda: job.coordinator.verdict, "the nonsense ended nothing")
    text = job.coordinator.verdict.text
    assert "it sent something that no rank sends" in text and "network" not in text


def test_a_rank_does_not_wait_for_long_where_another_program_answers(monkeypatch):
    """Rank 0 ended, because its port was taken."""
    monkeypatch.setattr(member, "_STRANGER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with suppress(OSError):
                while True:
                    with listener.accept()[0] as connection:
                        connection.recv(1000)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        address = listener.getsockname()
        with pytest.raises(NotJoined, match=f"rank 2 on n1 finds another program at 127.0.0.1:{address[1]}"):
            Member.join(lambda: (*address, ""), Hello(2, 4, "n1", 1), RendezvousLimits(60))


def test_a_coordinator_that_comes_late_or_moves_is_found():
    silent = socket.create_server(("127.0.0.1", 0))
    places = [(*silent.getsockname(), "stale")]
    silent.close()
    job: list[Job] = []

    def find():
        if len(places) == 1:
            job.append(Job(1, nonce="fresh"))
            places.append((*job[0].address, "fresh"))
            return places[0]
        return places[1]

    found = Member.join(find, Hello(0, 1, "n0", 1), RendezvousLimits(PATIENCE))
    found.agree("start", {}, "")
    found.leave()
    assert job[0].coordinator.join(PATIENCE)


def test_a_rank_says_what_it_waits_for(monkeypatch):
    monkeypatch.setattr(member, "NOTE_SECONDS", 0.0)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    with pytest.raises(NotJoined, match="rank 2 on n1 did not reach the coordinator of the job at 127"):
        Member.join(
            lambda: (*address, ""), Hello(2, 4, "n1", 1), RendezvousLimits(0.3), RankCalls(said.append)
        )
    [line] = said
    assert line.startswith(f"rank 2 on n1 waits for the coordinator of the job at 127.0.0.1:{address[1]}")
    assert "refused" in line


def test_a_rank_that_waits_for_a_value_says_so_once(start, monkeypatch):
    monkeypatch.setattr(member, "NOTE_SECONDS", 0.02)
    [one] = start(1).join_all()
    notes: list[int] = []
    threading.Timer(0.1, lambda: one.announce("inputs", "made")).start()
    assert one.wait("inputs", lambda: notes.append(1)) == "made"
    assert notes == [1]


def test_more_ranks_than_open_files_by_default(monkeypatch):
    limits = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr("resource.setrlimit", lambda _, new: limits.append(new))
    listener = socket.create_server(("127.0.0.1", 0))
    Coordinator(listener, CoordinatedJob(1000), say=print)
    listener.close()
    assert limits == [(1356, 4096)]


def test_a_killed_process_is_a_lost_rank(start):
    job = start(2)
    other = job.join(0)
    child = os.fork()
    if child == 0:
        try:
            job.join(1)
            time.sleep(60)
        finally:
            os._exit(0)
    wait_until(lambda: job.coordinator.complete, "the ranks did not both come")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with pytest.raises(JobEnded, match=r"rank 1 .* vanished"):
        other.wait("store")
