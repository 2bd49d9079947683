"""`megalite launch` on two hosts from a terminal that closes, as where an ssh session is lost: the ranks save."""

from pathlib import Path

import pytest

from megalite.checkpoint.folder import find_latest
from tests.support.hosts import PYTHON, ROOT
from tests.support.jobs import Job, curve
from tests.support.real_launchers import LAUNCHERS, Started
from tests.support.waiting import soon

pytestmark = pytest.mark.extended

# They print through pipes of their own, which outlive the terminal.
OTHERS = ("torchrun", "mpirun", "deepspeed")


@pytest.mark.parametrize("backend", ["ssh", *[pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]])
def test_a_job_whose_terminal_closes_saves_on_all_hosts(hosts, tmp_path: Path, backend: str) -> None:
    job, folder = Job.write(tmp_path, tensor=1, pipeline=1, data=4), tmp_path / "run"
    flags = ("--training.steps", "100000", "--checkpoint.every", "50000")
    [(host, command, variables)] = LAUNCHERS[f"launch-{backend}"](
        hosts, [], ["megalite", *job.arguments(folder, *flags)]
    )
    terminal = [PYTHON, "-m", "tests.support.closing_terminal", str(folder / "metrics.jsonl"), "4", *command]
    started = Started([(host, terminal, {"TERM": "xterm", **variables})], ROOT)
    assert started.wait() == [75], started.output
    assert find_latest(folder / "checkpoints").name == f"step-{curve(folder)[-1][0]:06d}"
    started.gone(within=soon(10))
