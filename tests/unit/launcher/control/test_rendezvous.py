"""How ranks find the coordinator of their job: at MASTER_ADDR:MASTER_PORT, through torchrun's store, or where told."""

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from megalite.errors import LaunchError
from megalite.launcher.control import rendezvous as module
from megalite.launcher.control.connection import RendezvousLimits
from megalite.launcher.control.coordinator import Coordinator
from megalite.launcher.control.member import NO_CALLS, RankCalls
from megalite.launcher.control.messages import Verdict
from megalite.launcher.control.rank_states import CoordinatedJob
from megalite.launcher.control.rendezvous import Meeting, meet
from megalite.launcher.rank.address import Route
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.environment import agent_owns_port, coordinator_address
from tests.support.members import break_off

LIMITS = RendezvousLimits(rendezvous_seconds=5, heartbeat_seconds=5)


def infos(ranks: int, **fields) -> list[RankInfo]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"launcher": "deepspeed", "node": "n0", "master_addr": "127.0.0.1", "master_port": port, **fields}
    return [
        RankInfo(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, **given)
        for rank in range(ranks)
    ]


def no_store(info: RankInfo):
    raise AssertionError("only torchrun has a store")


def together(ranks: list[RankInfo], act: Callable[[Meeting], object], agent_store=no_store) -> list[object]:
    """Let the ranks meet, each in its thread; return what `act` returns for each."""
    results: list[object] = [None] * len(ranks)

    def run(info: RankInfo) -> None:
        try:
            met = meet(info, LIMITS, NO_CALLS, agent_store=agent_store)
            results[info.rank] = act(met)
            met.leave()
        except Exception as error:
            results[info.rank] = error

    threads = [threading.Thread(target=run, args=[info]) for info in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.fixture(autouse=True)
def without_a_launcher(monkeypatch):
    for name in ("MEGALITE_COORDINATOR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def test_ranks_meet_at_the_master_port():
    ranks = infos(4)
    place = ("127.0.0.1", ["n0"] * 4, f"127.0.0.1:{ranks[0].master_port}")
    assert together(ranks, lambda met: (met.address, met.hosts, met.meets_at)) == [place] * 4


@pytest.mark.parametrize(
    ("launcher", "remedy"),
    [
        ("the environment", "set MASTER_PORT to a free port on every host"),
        ("slurm", "set MASTER_PORT to a free port on every host"),
        ("deepspeed", "give deepspeed a free port with --master_port"),
    ],
)
def test_a_port_in_use_is_named_with_its_owner(monkeypatch, launcher, remedy):
    monkeypatch.setattr(module, "_PORT_SECONDS", 0)
    info = replace(infos(1)[0], launcher=launcher)
    with (
        socket.create_server(("127.0.0.1", info.master_port)),
        pytest.raises(
            LaunchError,
            match=rf"^port {info.master_port} on n0 is in use by pid {os.getpid()} \(.+\); {remedy}$",
        ),
    ):
        meet(info, LIMITS, NO_CALLS, agent_store=no_store)


def test_a_master_address_of_another_host_is_an_error(monkeypatch):
    route = Route("eth0", "10.77.0.10", "10.77.0.99", serves=False)
    monkeypatch.setattr(module, "route_to_master", lambda *_: route)
    info = replace(infos(2, master_addr="n9")[0], local_world_size=1)
    with pytest.raises(
        LaunchError,
        match=r"MASTER_ADDR = n9 \(10\.77\.0\.99\) is no address of n0, .* set MASTER_ADDR to 10\.77\.0\.10",
    ):
        meet(info, LIMITS, NO_CALLS, agent_store=no_store)


def test_an_address_that_cannot_be_listened_at_is_an_error(monkeypatch):
    # TEST-NET-1 is no address of any host.
    monkeypatch.setattr(
        module, "route_to_master", lambda *_: Route("eth0", "192.0.2.1", "192.0.2.1", serves=True)
    )
    info = replace(infos(2)[0], local_world_size=1)
    with pytest.raises(LaunchError, match=r"rank 0 cannot listen at 192\.0\.2\.1:\d+ on n0"):
        meet(info, LIMITS, NO_CALLS, agent_store=no_store)


def test_the_launching_process_may_be_the_coordinator(monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    coordinator = Coordinator(listener, CoordinatedJob(2, nonce="a1"), say=print)
    coordinator.start()
    monkeypatch.setenv("MEGALITE_COORDINATOR", f"127.0.0.1:{coordinator.address[1]}/a1")
    assert together(infos(2, job="slurm 7.0"), lambda met: met.coordinator) == [None, None]
    assert coordinator.join(5)


@pytest.mark.parametrize("value", ["127.0.0.1", "n0:29500", "n0:x/a1", "n0:29500/", "n0:29500/a b"])
def test_a_malformed_coordinator_is_an_error(value):
    with pytest.raises(LaunchError, match="is not ADDRESS:PORT/NONCE"):
        coordinator_address({"MEGALITE_COORDINATOR": value})


def test_an_address_of_either_family_is_read():
    assert coordinator_address({"MEGALITE_COORDINATOR": "n0:29500/a1"}) == ("n0", 29500, "a1")
    assert coordinator_address({"MEGALITE_COORDINATOR": "[fd00::1]:29500/a1"}) == ("fd00::1", 29500, "a1")
    assert coordinator_address({}) is None


class Store:
    """The agent's store, which keeps the text of an earlier attempt."""

    def __init__(self, text: str = ""):
        self.text = text

    def put(self, key: str, text: str) -> None:
        self.text = text

    def get(self, key: str) -> str:
        if not self.text:
            raise OSError("rank 0 has not told its address yet")
        return self.text


def test_under_torchrun_a_stale_address_is_passed_over(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        stale = f"127.0.0.1 {gone.getsockname()[1]} 0123"
    for text in ("", stale):
        store, ranks = Store(text), infos(3)
        first = threading.Event()

        def open_store(info: RankInfo, store: Store = store, first: threading.Event = first) -> Store:
            if info.rank == 0:
                first.wait(0.5)  # the others read the stale text before
            return store

        assert together(ranks, lambda met: met.hosts, open_store) == [["n0"] * 3] * 3
        assert store.text != text


def test_an_attempt_that_is_still_there_refuses_the_next_one(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    old = Coordinator(socket.create_server(("127.0.0.1", 0)), CoordinatedJob(2, nonce="fresh"), say=print)
    old.start()
    store = Store(f"127.0.0.1 {old.address[1]} stale")
    assert together(infos(2), lambda met: met.hosts, lambda _: store) == [["n0"] * 2] * 2
    assert not old.ranks
    old.stop()
    assert old.join(5)


@pytest.mark.parametrize(("used", "owns"), [("True", True), ("False", False), (None, False)])
def test_the_agent_owns_the_port_unless_it_says_not(used, owns):
    told = {} if used is None else {"TORCHELASTIC_USE_AGENT_STORE": used}
    assert agent_owns_port({"TORCHELASTIC_RUN_ID": "7", **told}) is owns


def test_a_rank_that_is_lost_while_others_leave_is_told(monkeypatch):
    verdicts: list[object] = []

    def act(met: Meeting) -> None:
        assert met.hosts
        if met.member.hello.rank == 1:
            break_off(met.member)
        else:
            verdicts.append(met.leave())

    together(infos(2), act)
    [verdict] = verdicts
    assert verdict.rank == 1


def test_a_verdict_that_is_there_before_a_rank_comes_ends_it(monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    coordinator = Coordinator(listener, CoordinatedJob(2, nonce="a1"), say=print)
    coordinator.start()
    coordinator.end(Verdict("rank 1 cannot read run.toml", 2, 1, "n1"))
    monkeypatch.setenv("MEGALITE_COORDINATOR", f"127.0.0.1:{coordinator.address[1]}/a1")
    ended: list[Verdict] = []
    came = threading.Thread(
        target=lambda: meet(infos(2)[0], LIMITS, RankCalls(ended=ended.append), agent_store=no_store)
    )
    came.start()
    came.join(5)
    assert coordinator.join(10)
    assert [verdict.text for verdict in ended] == ["rank 1 cannot read run.toml"]
