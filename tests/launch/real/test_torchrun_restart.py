"""The real torchrun starts a job on two hosts again after one of its ranks was killed."""

import os
import signal

import pytest

from tests.support.jobs import SIX_STEPS, curve
from tests.support.real_launchers import ranks, run

pytestmark = pytest.mark.extended


def test_torchrun_restarts_a_job_whose_rank_was_killed(hosts, job, by_itself, tmp_path):
    folder = tmp_path / "run"
    started = run(
        "torchrun",
        hosts,
        ["megalite", *job.arguments(folder, *SIX_STEPS)],
        # The default, with which torch 2.13's own rendezvous gives the second attempt the addresses of the first.
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"},
        options=["--max-restarts=1"],
    )
    started.until("saved step-000003")
    rank = next(pid for pid in ranks(hosts).values() if pid in hosts[1].processes())
    os.kill(rank, signal.SIGKILL)
    assert started.wait() == [0, 0], started.output
    assert curve(folder) == by_itself
    assert "resum" in started.output
