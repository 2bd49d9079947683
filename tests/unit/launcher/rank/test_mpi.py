"""Ranks of mpirun agree on the master: by the process manager's store, and with clear refusals."""

import importlib.util
import os
import socket
import threading
from dataclasses import replace

import pytest

from megalite.errors import LaunchError
from megalite.launcher.rank import mpi
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.interfaces import interface_addresses
from megalite.launcher.rank.pmi import ProcessManager

RANKS = [RankInfo(rank, 2, 0, 1, "", 29500, "mpich", f"n{rank}", hosts=2) for rank in range(2)]


class Mpirun:
    """The part of mpirun in PMI 1: one connection to each rank, a store and a barrier."""

    def __init__(self, size: int, answers: dict[str, str] | None = None) -> None:
        pairs = [socket.socketpair() for _ in range(size)]
        self.ranks = [rank for _, rank in pairs]
        self.store: dict[str, str] = {}
        self.finalized = 0
        self._answers = answers or {}
        self._barrier = threading.Barrier(size)
        for own, _ in pairs:
            threading.Thread(target=self._serve, args=[own], daemon=True).start()

    def environ(self, rank: int) -> dict[str, str]:
        return {"PMI_FD": str(self.ranks[rank].fileno())}

    def _serve(self, own: socket.socket) -> None:
        for line in own.makefile("r"):
            pairs = dict(pair.partition("=")[::2] for pair in line.split())
            command = pairs["cmd"]
            if command == "put":
                self.store[pairs["key"]] = pairs["value"]
            if command == "barrier_in":
                self._barrier.wait()
            self.finalized += command == "finalize"
            answer = {
                "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
                "get_my_kvsname": "my_kvsname kvsname=kvs_1",
                "put": "put_result rc=0 msg=success",
                "barrier_in": "barrier_out rc=0",
                "get": f"get_result rc=0 msg=success value={self.store.get(pairs.get('key', ''))}",
                "finalize": "finalize_ack",
            } | self._answers
            own.sendall(f"cmd={answer[command]}\n".encode())


def agreed(mpirun: Mpirun, seconds: float = 5.0) -> list[RankInfo | LaunchError]:
    """Let all ranks agree, each in a thread; return what each has or raised."""
    found: list[RankInfo | LaunchError | None] = [None] * len(mpirun.ranks)

    def rank(number: int) -> None:
        info = replace(RANKS[number], world_size=len(mpirun.ranks))
        try:
            found[number] = mpi.master_over_mpi(info, mpirun.environ(number), seconds=seconds)
        except LaunchError as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=[number]) for number in range(len(found))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    return found  # type: ignore[return-value]


HAS_NETWORK = any(each.reachable for each in interface_addresses())


@pytest.mark.skipif(not HAS_NETWORK, reason="this machine has no network")
def test_all_ranks_take_the_address_of_rank_0_that_all_reach():
    mpirun = Mpirun(2)
    first, second = agreed(mpirun)
    assert isinstance(first, RankInfo) and isinstance(second, RankInfo), (first, second)
    assert first.master_addr == second.master_addr and first.master_port == second.master_port
    assert first.master_addr in {each.address for each in interface_addresses() if each.reachable}
    assert first.master_port in range(20000, 30000)
    assert mpirun.finalized == 2


@pytest.mark.skipif(not HAS_NETWORK, reason="this machine has no network")
def test_an_address_that_a_rank_does_not_reach_is_not_taken(monkeypatch):
    monkeypatch.setattr(mpi, "_reaches", lambda address, port, token: False)
    for error in agreed(Mpirun(2)):
        assert "is reached by all ranks, not from" in str(error) and "set launch.interface" in str(error)


def test_a_token_of_another_service_is_not_rank_0():
    with mpi._Probe("127.0.0.1") as probe:
        assert mpi._reaches("127.0.0.1", probe.port, probe.token)
        assert not mpi._reaches("127.0.0.1", probe.port, "0" * 32)
    assert not mpi._reaches("127.0.0.1", probe.port, probe.token)


def test_ranks_that_never_come_end_the_wait():
    mpirun = Mpirun(2)
    manager = ProcessManager(mpirun.ranks[0].fileno(), 0, 2, seconds=0.1)
    with pytest.raises(LaunchError, match=r"^the 2 ranks of mpirun did not all come within 0\.1 s"):
        manager.bcast(1)


def test_an_answer_that_is_none_is_said():
    mpirun = Mpirun(1, {"put": "put_result rc=-1 msg=no_room"})
    manager = ProcessManager(mpirun.ranks[0].fileno(), 0, 1, seconds=1)
    with pytest.raises(LaunchError, match="'cmd=put_result rc=-1 msg=no_room' where ranks agree"):
        manager.allgather({"a": 1})


def test_mpi4py_that_is_missing_is_named_with_both_remedies(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"pip install 'megalite\[mpi\]'\), or export MASTER_ADDR"):
        mpi.master_over_mpi(replace(RANKS[1], launcher="openmpi"), dict(os.environ), seconds=1)
