"""megalite launch --restarts: the hosts, the arguments and the exit code of each attempt; no rank is started."""

import pytest

from megalite.cli import doctor, launch, main
from megalite.launcher.hosts.host_report import HostFinding, HostReport
from megalite.launcher.hosts.preflight import Preflight
from megalite.launcher.hosts.supervise import Result
from megalite.train import run_progress
from tests.cli.test_launch_cli import RUN

LOST = Result(137, "rank 3 on n1 was killed by SIGKILL", 7)


class Attempts:
    """Replaces the start of the ranks and the preflight of the hosts; `dead` hosts fail it."""

    def __init__(self, *results: Result):
        self.results, self.plans, self.dead = list(results), [], set()

    def start(self, plan, environ) -> Result:
        self.plans.append(plan)
        return self.results.pop(0)

    def ask(self, plan, options, slots) -> Preflight:
        dead = self.dead if self.plans else set()
        findings = [HostFinding(name, "reachable", "cannot be reached") for name in slots if name in dead]
        return Preflight([HostReport(name, count) for name, count in slots.items()], findings)

    def hosts(self) -> list[list[str]]:
        return [[host.name for host in plan.hosts] for plan in self.plans]


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Return a function that launches a run on n0, n1 and n2, whose attempts end as given."""
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "hosts").write_text("n0 slots=2\nn1 slots=2\nn2 slots=2\n")
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("megalite.launcher.hosts.restarts._LONGEST_PAUSE_SECONDS", 0)

    def run(attempts: Attempts, *options: str) -> int:
        monkeypatch.setattr(launch, "_attempt", attempts.start)
        monkeypatch.setattr(launch, "_ask", attempts.ask)
        return main(["launch", "run.toml", "--hostfile", "hosts", "--backend", "ssh", *options])

    return run


def test_a_restart_takes_the_spare_host_and_the_exit_code_is_the_last(begin, capsys):
    attempts = Attempts(LOST, Result(0))
    attempts.dead = {"n1"}
    assert begin(attempts, "--restarts", "1") == 0
    assert attempts.hosts() == [["n0", "n1"], ["n0", "n2"]]
    said = capsys.readouterr().out
    assert "restart 1 of 1 in 0 s, from the beginning, after: rank 3 on n1 was killed by SIGKILL" in said
    assert "n1 left out: the other hosts have 4 slots for 4 ranks" in said
    assert "error: n1: cannot be reached" in said


def test_fewer_hosts_are_given_the_smaller_layout_after_all_flags(begin, capsys):
    attempts = Attempts(LOST, Result(75))
    attempts.dead = {"n1", "n2"}
    assert begin(attempts, "--restarts", "1", "--allow-fewer", "--training.steps", "9") == 75
    job = attempts.plans[1].job
    assert attempts.hosts()[1] == ["n0"] and job.world_size == 2
    assert attempts.plans[1].loaded.config.layout.world_size == 2
    assert job.arguments[:4] == ("train", "run.toml", "--training.steps", "9")
    assert {"--parallel.tensor=2", "--parallel.pipeline=1", "--training.global_batch_size=8"} < set(
        job.arguments
    )


def test_without_enough_hosts_the_restarts_are_used_up_and_the_last_cause_stands_last(begin, capsys):
    attempts = Attempts(LOST)
    attempts.dead = {"n1", "n2"}
    assert begin(attempts, "--restarts", "2") == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: n1, n2 did not pass the preflight")
    assert "no restart: all 2 are used (--restarts, launch.restarts)" in said.out


def test_without_restarts_a_failure_is_told_once(begin, capsys):
    assert begin(Attempts(LOST)) == 137
    said = capsys.readouterr()
    assert said.err == "error: rank 3 on n1 was killed by SIGKILL\n" and "restart" not in said.out


def test_a_job_that_was_told_to_end_is_not_started_again(begin, capsys):
    attempts = Attempts(Result(137, "megalite train was killed by signal 9", asked=True), Result(0))
    assert begin(attempts, "--restarts", "3", "--no-preflight") == 137
    assert len(attempts.plans) == 1 and "restart" not in capsys.readouterr().out


def test_a_run_that_began_elsewhere_resumes_from_its_own_checkpoint(begin, monkeypatch):
    attempts = Attempts(LOST, Result(137, "rank 3 again", 9), Result(0))
    for module in (launch, run_progress):  # at first the folder has that of an earlier run
        monkeypatch.setattr(module, "published_step", lambda folder: 4 if len(attempts.plans) > 1 else 8)
    assert begin(attempts, "--restarts", "3", "--checkpoint.resume", "never", "--no-preflight") == 0
    assert attempts.plans[1].job.arguments[-2:] == ("--checkpoint.resume", "never")
    assert attempts.plans[2].job.arguments[-2:] == ("--checkpoint.resume", "auto")
    assert attempts.plans[2].loaded.config.checkpoint.resume == "auto"


def test_on_this_machine_alone_train_itself_restarts_its_ranks(tmp_path, monkeypatch):
    """It has imported torch, which another start would import again."""
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    attempts = Attempts(Result(137, "megalite train was killed by signal 9"), Result(1))
    monkeypatch.setattr(launch, "_attempt", attempts.start)
    monkeypatch.setattr("megalite.launcher.hosts.restarts._LONGEST_PAUSE_SECONDS", 0)
    flags = ["--local", "--no-preflight", "--restarts", "3"]
    assert main(["launch", "run.toml", *flags, "--launch.restarts", "1"]) == 1
    first, second = (plan.job.arguments for plan in attempts.plans)
    assert first[-3:] == ("--launch.restarts", "1", "--launch.restarts=3")
    assert second == (*first, "--launch.restarts=2")


def test_the_preflight_sets_what_travels_but_no_secret(tmp_path, monkeypatch, capsys):
    """ps shows the commands of ssh to all users of a machine."""
    (tmp_path / "hosts").write_text("n0 slots=1\n")
    seen = []
    result = Preflight([HostReport("n0", 1)], [])
    monkeypatch.setattr(doctor, "preflight", lambda slots, wanted, *rest: seen.append(wanted) or result)
    for name in ("NCCL_DEBUG", "HF_HUB_TOKEN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    assert main(["doctor", "--hostfile", str(tmp_path / "hosts")]) == 0
    assert "NCCL_DEBUG" in seen[0].environment
    assert not {"HF_HUB_TOKEN", "CUDA_VISIBLE_DEVICES"} & set(seen[0].environment)
