"""`megalite launch` on two hosts: a rank of the second host hangs, and the screen of the first host names it."""

import re
import time
from pathlib import Path
from statistics import median

import pytest

from megalite.monitor.jsonl import read_metrics
from tests.support.hang_faults import FAULTS, HANGS_IN, RANK, SITE
from tests.support.hosts import ROOT
from tests.support.jobs import Job
from tests.support.real_launchers import run
from tests.support.waiting import soon, wait_until

pytestmark = pytest.mark.extended

# The words of the report about the rank, and a function in which it is.
EXPECTED = {
    "forward": ("forward and backward", "hang"),
    "backward": ("forward and backward", "hang"),
    "data": ("waiting for the batch", "hang"),
    "callback": ("between two steps", "hang"),
    "save": ("saving a checkpoint", "hang"),
    "stopped": ("does not answer: stopped", ""),
    "left": ("waits in barrier over world", "barrier"),
}
CORE = ("forward", "save", "stopped")
HANG_SECONDS = 2.0
MORE = [pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS if fault not in CORE]


@pytest.mark.parametrize("fault", [*CORE, *MORE])
def test_a_rank_of_another_host_is_named(hosts, tmp_path: Path, fault: str) -> None:
    """The job ends after half of the time of a collective where the rank reads, saves or is in a callback.

    How soon it is named is printed: a busy machine delays it.
    """
    job, began = Job.write(tmp_path, tensor=1, pipeline=1, data=4), tmp_path / "began"
    (tmp_path / "sitecustomize.py").write_text(SITE)
    # The last save is not asynchronous: nothing goes on beside it.
    steps = HANGS_IN - 1 if fault == "save" else 100000
    flags = ["--monitor.hang_seconds", str(HANG_SECONDS), "--launch.collective_seconds", "40"]
    flags += ["--training.steps", str(steps), "--checkpoint.every", str(HANGS_IN - 1)]
    flags += ["--launch.heartbeat_seconds", "5"]
    exports = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "MEGALITE_TEST_HANG": f"{fault}={began}"}
    started = run(
        "launch-ssh",
        hosts,
        ["megalite", *job.arguments(tmp_path / "run", *flags)],
        options=[word for name, value in exports.items() for word in ("--export", f"{name}={value}")],
    )
    wait_until(began.exists, "rank 3 does not hang", soon(60))
    started.until(" hangs: no rank has moved for ")
    seconds = time.time() - float(began.read_text())
    usual = median(record["step_seconds"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    threshold = (HANG_SECONDS + 2 * usual) * (6 if fault == "save" else 1)
    print(f"{fault}: named {seconds:.1f} s after it began, {seconds - threshold:.1f} s after the threshold")
    assert started.wait() == [1], started.output
    # Where the report comes with the end, the second host says its first line too.
    said = re.search(rf"^(error: )?(?=step {HANGS_IN} hangs: )", started.output, re.MULTILINE)
    assert said is not None, started.output
    report = started.output[said.end() :].splitlines()
    doing, function = EXPECTED[fault]
    assert report[1].startswith(f"  rank {RANK} (pp 0, dp 3, tp 0) on n1: ") and doing in report[1], (
        started.output
    )
    assert not function or any(f" in {function}" in line for line in report), started.output
    started.gone(within=soon(10))
