"""The variables that we set for torch and DeepSpeed, and what the user set stays."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from megalite.launcher.rank import environment
from megalite.launcher.rank.address import Route
from megalite.launcher.rank.detect import RankInfo, local_rank_infos, rank_info
from megalite.launcher.rank.environment import (
    export_rank,
    exported_rank,
    grow_segments,
    prepare_process,
    threads_per_rank,
)
from tests.support.waiting import PATIENCE

FIVE = RankInfo(5, 8, 1, 4, "node-a", 29500, "", socket.gethostname(), hosts=2)


def test_what_is_exported_is_what_is_found_again(tmp_path):
    info = local_rank_infos(4, tmp_path / "store")[2]
    environ: dict[str, str] = {}
    export_rank(info, environ)
    found = rank_info(environ)
    assert found == replace(info, launcher="the environment", rendezvous="env://")
    assert environ["LOCAL_SIZE"] == "4"


def test_a_process_that_was_a_rank_for_a_while_is_none_afterwards(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "node-a")
    with exported_rank(local_rank_infos(1, tmp_path / "store")[0]):
        assert rank_info() is not None
    assert rank_info() is None and os.environ["MASTER_ADDR"] == "node-a"


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(environment, "available_cores", lambda: 4)
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 64)


@pytest.mark.parametrize(("ranks", "threads"), [(1, 4), (2, 2), (3, 1), (4, 1), (8, 1)])
def test_cores_are_shared_among_local_ranks(four_cores, ranks, threads):
    assert threads_per_rank(ranks, None, {}) == threads


def test_threads_that_somebody_chose_are_kept(four_cores):
    assert threads_per_rank(2, None, {"OMP_NUM_THREADS": "3"}) == 3
    assert threads_per_rank(2, None, {"OMP_NUM_THREADS": "many"}) == 2
    torchrun = replace(FIVE, launcher="torchrun")
    assert threads_per_rank(2, torchrun, {"OMP_NUM_THREADS": "1"}) == 2  # its own default, nobody's choice
    assert threads_per_rank(2, torchrun, {"OMP_NUM_THREADS": "3"}) == 3
    assert threads_per_rank(2, replace(FIVE, launcher="deepspeed"), {"OMP_NUM_THREADS": "1"}) == 1


def test_cores_that_a_launcher_bound_to_a_rank_are_its_own(four_cores):
    slurm = replace(FIVE, launcher="slurm")
    assert threads_per_rank(8, slurm, {"SLURM_CPUS_ON_NODE": "32"}) == 4
    assert threads_per_rank(4, slurm, {"SLURM_CPUS_ON_NODE": "4"}) == 1
    assert threads_per_rank(32, replace(FIVE, launcher="openmpi"), {}) == 2


def test_a_process_is_prepared_but_what_the_user_set_stays(four_cores, tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert prepare_process(local_ranks=2, environ=environ) == 2
    assert {environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"2"}
    assert environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "megalite" / "torch_extensions")
    assert environ["TOKENIZERS_PARALLELISM"] == "false"
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert environ["GOMP_SPINCOUNT"] == "1000"
    assert "HF_HUB_OFFLINE" not in environ

    mine = {"GLOO_SOCKET_IFNAME": "eth7", "TOKENIZERS_PARALLELISM": "true", "DS_ACCELERATOR": "hpu"}
    environ = dict(mine, OMP_NUM_THREADS="7", OMP_WAIT_POLICY="active")
    assert prepare_process(3, local_ranks=2, environ=environ) == 3
    assert environ["OMP_NUM_THREADS"] == "3"
    assert "GOMP_SPINCOUNT" not in environ
    assert {name: environ[name] for name in mine} == mine


def test_segments_of_cuda_memory_grow_unless_the_user_configures_them(tmp_path):
    grown, cpu = {}, {}
    grow_segments(cpu, tmp_path)
    assert cpu == {}, "there is no NVIDIA card"
    (tmp_path / "nvidiactl").touch()
    grow_segments(cpu, tmp_path)
    assert cpu == {}, "the driver's own file is no card"
    (tmp_path / "nvidia0").touch()
    grow_segments(grown, tmp_path)
    assert grown == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    ):
        mine = {name: "max_split_size_mb:512"}
        grow_segments(mine, tmp_path)
        assert mine == {name: "max_split_size_mb:512"}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_collectives_leave_nothing_in_memory(monkeypatch, tmp_path):
    """On a CPU 2,000 all-reduces leave no block on the heap; torch's flight recorder would keep half a megabyte."""
    monkeypatch.setattr(environment, "_ACCELERATORS", ())
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    prepare_process(1, environ=environ)
    script = """
import ctypes, sys, torch, torch.distributed as dist
class Mallinfo2(ctypes.Structure):
    _fields_ = [(str(place), ctypes.c_size_t) for place in range(10)]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
def allocated(collectives):
    for _ in range(collectives):
        dist.all_reduce(torch.zeros(1))
    return getattr(libc.mallinfo2(), "7")
before = allocated(100)
print(allocated(2000) - before)
dist.destroy_process_group()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "store")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environ)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 200_000


def test_the_flight_recorder_stays_as_the_user_set_it(monkeypatch):
    monkeypatch.setattr(environment, "_ACCELERATORS", ())
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        environ = {name: "50"}
        prepare_process(1, environ=environ)
        assert {key: value for key, value in environ.items() if "BUFFER_SIZE" in key} == {name: "50"}


def test_ranks_on_several_nodes_use_the_interface_of_their_route(four_cores, monkeypatch):
    route = Route("eth0", "10.0.0.5", "10.0.0.1", serves=False)
    monkeypatch.setattr(environment, "route_to_master", lambda info, environ, interface: route)
    environ = {"NCCL_SOCKET_IFNAME": "eth0"}
    prepare_process(info=FIVE, environ=environ)
    assert environ["GLOO_SOCKET_IFNAME"] == environ["TP_SOCKET_IFNAME"] == "eth0"
    environ = {}
    prepare_process(info=replace(FIVE, world_size=4, rank=1), environ=environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "lo" and "NCCL_SOCKET_IFNAME" not in environ
