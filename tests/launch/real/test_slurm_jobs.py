"""launch/slurm.sbatch on a real SLURM: what a job does that fails, is stopped, pre-empted or loses a node.

A stub stands for `python -m megalite train` where training itself is not the subject: it notes each start, works for
some seconds, and stops with exit code 75 when it is told to.
"""

import time
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.hosts import ROOT, Hosts
from tests.support.jobs import Job, curve
from tests.support.real_launchers import PYTHON
from tests.support.slurm_cluster import SlurmCluster, missing
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.extended

BATCH = ROOT / "launch" / "slurm.sbatch"
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
STUB = """
import os, pathlib, signal, sys, time
start, rank = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ["SLURM_PROCID"]
job = os.environ["SLURM_JOB_ID"]
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: os._exit(75))
with open("starts", "a") as file:
    file.write(f"job {job} start {start} rank {rank} on {os.environ['SLURMD_NODENAME']}\\n")
seconds, *codes = os.environ["PLAN"].split()  # seconds of the first start, and the exit code of each start
first = start == "0" and not pathlib.Path("second").exists()
if first:
    time.sleep(float(seconds) if rank != "3" or "1" not in codes else 0.1)
code = int(codes[min(int(start), len(codes) - 1)])
sys.exit(code if code != 1 or rank == "3" else 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stub = tmp_path / "python"
    stub.write_text(f"#!{PYTHON} -S\n{STUB}")
    stub.chmod(0o755)
    return tmp_path


def submit(slurm: SlurmCluster, folder: Path, plan: str, *options: str, **env: str) -> int:
    """Submit the batch script with the stub; plan: seconds of the first start, exit codes of the starts."""
    variables = {"PYTHON": str(folder / "python"), "RUN": "run.toml", "PLAN": plan} | env
    return slurm.submit(*TWO_BY_TWO, "--output=log", *options, BATCH, env=variables, cwd=folder)


def starts(folder: Path) -> list[str]:
    """Return what the ranks noted, sorted."""
    path = folder / "starts"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def expect(job: int, *numbers: int, nodes: tuple[str, str] = ("n0", "n1")) -> list[str]:
    return [
        f"job {job} start {start} rank {rank} on {nodes[rank // 2]}" for start in numbers for rank in range(4)
    ]


def running(slurm: SlurmCluster, folder: Path, job: int, count: int = 4) -> None:
    slurm.wait(job, "RUNNING")
    wait_until(lambda: len(starts(folder)) >= count, f"not {count} ranks: {starts(folder)}")


def test_a_job_that_stopped_to_be_resumed_is_requeued_and_one_that_failed_is_not(slurm, folder):
    stopped = submit(slurm, folder, "60 0 0")
    running(slurm, folder, stopped)
    slurm.run(["scancel", "--signal=TERM", str(stopped)])
    assert slurm.wait(stopped, "COMPLETED")["Restarts"] == "1"
    assert starts(folder) == expect(stopped, 0, 1)

    (folder / "starts").unlink()
    began = time.monotonic()
    failed = submit(slurm, folder, "600 1")
    ended = slurm.wait(failed, "FAILED")
    # One rank failed; the others, which would have worked for ten minutes, were ended with it.
    assert ended["Restarts"] == "0" and ended["ExitCode"] == "1:0" and time.monotonic() - began < PATIENCE
    assert starts(folder) == expect(failed, 0)
    assert not slurm.hosts.processes(str(folder))


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_to_the_batch_script_alone_reaches_the_ranks(slurm, folder, name):
    """As `--signal=B:TERM@300` sends it. A shell that waits for srun would note it, and the job would run on."""
    job = submit(slurm, folder, "60 0 0")
    running(slurm, folder, job)
    slurm.run(["scancel", "--batch", f"--signal={name}", str(job)])
    assert slurm.wait(job, "COMPLETED")["Restarts"] == "1"
    assert starts(folder) == expect(job, 0, 1)


def test_a_job_that_a_higher_partition_pre_empts_goes_on_after_it(slurm, folder):
    job = submit(slurm, folder, "60 0 0")
    running(slurm, folder, job)
    other = slurm.submit(
        *TWO_BY_TWO,
        "--exclusive",
        "--partition=high",
        "--output=/dev/null",
        "--wrap=srun sleep 1",
        cwd=folder,
    )
    slurm.wait(other, "COMPLETED")
    assert slurm.wait(job, "COMPLETED")["Restarts"] == "1"
    assert starts(folder) == expect(job, 0, 1)


@pytest.mark.slow  # a signal that requeues: the pre-emption of a stub
def test_the_signal_before_the_time_limit_stops_and_requeues(slurm, folder):
    job = submit(slurm, folder, "100 0 0", "--time=1", "--signal=TERM@45")
    assert slurm.wait(job, "COMPLETED")["Restarts"] == "1"
    assert starts(folder) == expect(job, 0, 1)


def test_an_array_and_a_chain_run_one_after_the_other(slurm, folder):
    array = submit(slurm, folder, "0.5 75", "--array=1-2%1", "--output=log-%a", REQUEUE="no")
    after = submit(slurm, folder, "0.5 0", f"--dependency=afterany:{array}")
    assert slurm.wait(after, "COMPLETED")["ExitCode"] == "0:0"
    jobs = [int(line.split()[1]) for line in (folder / "starts").read_text().splitlines()]
    one_after_the_other = [(job, len(list(ranks))) for job, ranks in groupby(jobs)]
    assert [count for _, count in one_after_the_other] == [4, 4, 4] and jobs[-1] == after
    assert slurm.state(f"{array}_1") == slurm.state(f"{array}_2") == "FAILED"


def test_a_job_that_loses_a_node_goes_on_elsewhere(folder):
    if reason := missing():
        pytest.skip(reason)
    with Hosts.up(3) as hosts:
        slurm = SlurmCluster.up(hosts)
        job = submit(slurm, folder, "100 0 0")
        running(slurm, folder, job)
        hosts[1].die()
        assert slurm.wait(job, "COMPLETED")["Restarts"] == "1"
        assert starts(folder)[4:] == expect(job, 1, nodes=("n0", "n2"))


@pytest.mark.slow  # pre-emption: the stub before; saving and going on bit for bit: test_stops_on_slurm
def test_a_pre_empted_training_ends_with_the_same_numbers(slurm, tmp_path):
    job = Job.write(tmp_path)
    reference, interrupted = tmp_path / "reference", tmp_path / "interrupted"
    # The signal comes two seconds or more after the first step, and before the last.
    length = ("--training.steps", "100", "--checkpoint.every", "1000")
    job.run(reference, *length)
    env = {"PYTHON": PYTHON, "RUN": str(job.run_file)}
    arguments = ["--run.folder", str(interrupted), *length]
    number = slurm.submit(*TWO_BY_TWO, "--output=log", BATCH, *arguments, env=env, cwd=tmp_path)
    metrics = interrupted / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, "no second step")
    slurm.submit(
        *TWO_BY_TWO,
        "--exclusive",
        "--partition=high",
        "--output=/dev/null",
        "--wrap=srun sleep 1",
        cwd=tmp_path,
    )
    log = tmp_path / "log"
    assert slurm.wait(number, "COMPLETED", within=180)["Restarts"] == "1", log.read_text()
    saved = [path.name for path in (interrupted / "checkpoints").glob("step-*")]
    assert len(saved) == 2, log.read_text()
    assert curve(interrupted) == curve(reference)
