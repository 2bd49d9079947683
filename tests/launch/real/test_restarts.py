"""`megalite launch --restarts` on two hosts: a rank is killed, a host is lost, or a host is gone before the start."""

import os
import re
import signal

import pytest

from tests.support.jobs import SIX_STEPS, curve
from tests.support.parity import FLOAT32_GRADIENT_RTOL, FLOAT32_RTOL, assert_close
from tests.support.real_launchers import ranks, run
from tests.support.waiting import soon

pytestmark = pytest.mark.extended


def launch(hosts, job, folder, *options: str, flags: tuple[str, ...] = ()):
    return run("launch-ssh", hosts, ["megalite", *job.arguments(folder, *SIX_STEPS, *flags)], options=options)


def test_a_killed_rank_is_started_again_and_the_run_ends_as_by_itself(hosts, job, by_itself, tmp_path):
    folder = tmp_path / "run"
    started = launch(hosts, job, folder, "--restarts", "2")
    started.until("saved step-000003")
    os.kill(ranks(hosts)[3], signal.SIGKILL)
    assert started.wait() == [0], started.output
    assert curve(folder) == by_itself
    assert "restart 1 of 2 in 1 s, from the checkpoint of step 3, after: rank 3" in started.output
    assert "1 earlier attempt failed: rank 3" in started.output
    started.gone(within=soon(10))


def test_a_job_goes_on_with_the_host_that_is_left(hosts, job, by_itself, tmp_path):
    folder = tmp_path / "run"
    flags = ("--launch.heartbeat_seconds", "4")
    options = ("--restarts", "1", "--allow-fewer", "--preflight-seconds", "15")
    started = launch(hosts, job, folder, *options, flags=flags)
    started.until("saved step-000003")
    hosts[1].die()
    assert started.wait(within=180) == [0], started.output
    assert "n1 left out: going on with 2 of 4 ranks" in started.output, started.output
    assert "the same global batch of 8" in started.output
    steps, losses, norms, rates, tokens = zip(*curve(folder), strict=True)
    whole = list(zip(*by_itself, strict=True))
    assert steps == whole[0] and rates == whole[3] and tokens == whole[4]
    # Dropout draws by global coordinates, so another layout differs in the order of its sums only.
    assert_close(losses, whole[1], rtol=FLOAT32_RTOL, what="losses")
    assert_close(norms, whole[2], rtol=FLOAT32_GRADIENT_RTOL, what="norms")


def test_copies_in_memory_outlive_a_host(hosts, job, by_itself, tmp_path):
    """Ranks 2 and 3, whose files only n1 would have, were copied to n0; no checkpoint is there to be read."""
    folder = tmp_path / "run"
    flags = (
        "--launch.heartbeat_seconds",
        "4",
        "--checkpoint.every",
        "100",
        "--checkpoint.in_memory_every",
        "1",
    )
    options = ("--restarts", "1", "--allow-fewer", "--preflight-seconds", "15")
    started = launch(hosts, job, folder, *options, flags=flags)
    started.until("step 4/6")
    hosts[1].die()
    assert started.wait(within=180) == [0], started.output
    assert "from the beginning or a newer copy in memory" in started.output
    [step] = re.findall(r"resumed after step (\d) from the copy in memory, /dev/shm/", started.output)
    assert int(step) >= 3
    steps, losses, *_, tokens = zip(*curve(folder), strict=True)
    whole = list(zip(*by_itself, strict=True))
    assert steps == whole[0] and tokens == whole[4]
    assert_close(losses, whole[1], rtol=FLOAT32_RTOL, what="losses")
    assert not hosts[0].run(["find", "/dev/shm", "-name", "megalite-copies-*"]).stdout


def test_no_rank_starts_where_a_host_is_gone(hosts, job, tmp_path):
    hosts[1].die()
    started = launch(hosts, job, tmp_path / "run", "--restarts", "2", "--preflight-seconds", "15")
    assert started.wait(within=15 + soon()) == [2], started.output
    assert "error: n1: " in started.output and "started by" not in started.output, started.output
    assert "restart" not in started.output
    assert not (tmp_path / "run").exists()
