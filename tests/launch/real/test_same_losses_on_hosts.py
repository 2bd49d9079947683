"""A job of four ranks on two hosts computes under every real launcher what it computes on one machine, to the bit."""

import pytest

from tests.support.jobs import Job, curve
from tests.support.real_launchers import run

pytestmark = pytest.mark.extended

STEPS = ("--training.steps", "6")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    return Job.write(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def by_itself(job: Job) -> list:
    folder = job.run_file.parent / "by-itself"
    job.run(folder, *STEPS)
    return curve(folder)


@pytest.mark.parametrize(
    "launcher",
    ["deepspeed-pdsh", "deepspeed-mpich", "torchrun"],
)
def test_same_losses_without_slurm(hosts, job, by_itself, tmp_path, launcher):
    check(hosts, job, by_itself, tmp_path / "run", launcher)


def test_same_losses_under_srun(slurm, job, by_itself, tmp_path):
    check(slurm.hosts, job, by_itself, tmp_path / "run", "srun")


def check(hosts, job, by_itself, folder, launcher):
    started = run(launcher, hosts, ["megalite", *job.arguments(folder, *STEPS)])
    codes = started.wait(240)
    assert set(codes) == {0}, started.output
    assert curve(folder) == by_itself
    assert len(by_itself) == 6
