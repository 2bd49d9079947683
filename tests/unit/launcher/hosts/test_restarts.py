"""Restarts: what is started again, after which pause, and when the job has shown that it would fail again."""

import pytest

from megalite.errors import LaunchError
from megalite.launcher.hosts.restarts import Ended, run_with_restarts

LOST = "rank 3 (n1, pid 77) was killed by SIGKILL"


class Job:
    """Ends as told, attempt by attempt; the clock is a list of pauses."""

    def __init__(self, *ends: Ended | LaunchError):
        self.ends, self.pauses, self.said, self.tries = ends, [], [], 0

    def attempt(self, number: int) -> Ended:
        assert number == self.tries
        self.tries += 1
        end = self.ends[number]
        if isinstance(end, LaunchError):
            raise end
        return end

    def run(self, restarts: int) -> Ended:
        return run_with_restarts(self.attempt, restarts, self.said.append, self.pauses.append)


def failing(*steps_and_checkpoints: tuple[int | None, int | None], code: int = 137) -> list[Ended]:
    return [Ended(code, LOST, step, checkpoint) for step, checkpoint in steps_and_checkpoints]


def test_a_lost_rank_restarts_the_job_and_the_end_counts_it():
    job = Job(*failing((57, 50)), Ended(0, ""))
    assert job.run(3).exit_code == 0
    assert job.said == [
        f"restart 1 of 3 in 1 s, from the checkpoint of step 50, after: {LOST}",
        f"1 earlier attempt failed: {LOST}",
    ]


@pytest.mark.parametrize("code", [0, 2, 75, 76, 130, 141, 143])
def test_an_end_that_was_asked_for_or_would_come_again_is_final(code):
    job = Job(Ended(code, "the end", 3, None))
    assert job.run(5).exit_code == code
    assert job.tries == 1 and job.said == [] and job.pauses == []


def test_no_attempt_follows_one_that_was_told_to_end_or_restarts_itself():
    job = Job(Ended(137, LOST, 3, None), Ended(1, "", 5, None, final=True))
    assert job.run(5).exit_code == 1
    assert job.tries == 2 and job.said[1:] == [f"1 earlier attempt failed: {LOST}"]


def test_without_restarts_nothing_is_started_again_nor_said():
    job = Job(*failing((3, None)))
    assert job.run(0).exit_code == 137 and job.said == []


def test_pauses_double_up_to_a_minute_while_no_checkpoint_is_new():
    job = Job(*failing(*((50 + each, 50) for each in range(9))))
    assert job.run(8).exit_code == 137
    assert job.pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert job.said[-2:] == [
        f"8 earlier attempts failed: {LOST}",
        "no restart: all 8 are used (--restarts, launch.restarts)",
    ]


def test_a_job_that_goes_on_waits_a_second_after_each_failure():
    job = Job(*failing((57, 50), (58, 50), (75, 70), (110, 100), (112, 100), (140, 130)), Ended(0, ""))
    assert job.run(9).exit_code == 0
    assert job.pauses == [1, 2, 1, 1, 2, 1]


def test_copies_in_memory_carry_a_job_on_without_a_new_checkpoint():
    ends = [Ended(137, LOST, step, 50, copied=True) for step in (57, 58, 58, 70)]
    job = Job(*ends[:2], Ended(137, LOST, 58, 50, started=False, copied=True), ends[3], Ended(0, ""))
    assert job.run(9).exit_code == 0
    assert job.pauses == [1, 1, 2, 1]
    assert job.said[0].startswith(
        "restart 1 of 9 in 1 s, from the checkpoint of step 50 or a newer copy in memory, "
    )
    assert Job(*ends).run(9).step == 58


def test_the_same_step_twice_without_a_new_checkpoint_ends_the_job():
    job = Job(*failing((57, 50), (57, 50), (58, 50)))
    assert job.run(9).step == 57
    assert job.tries == 2
    assert job.said[-1] == "no restart: the job failed twice at step 57, with no new checkpoint in between"


def test_the_same_step_with_a_new_checkpoint_or_another_step_goes_on():
    job = Job(*failing((57, 50), (57, 55), (58, 55)), Ended(0, ""))
    assert job.run(9).exit_code == 0 and job.tries == 4


def test_a_job_that_never_reaches_a_step_is_started_once_more():
    job = Job(*failing((None, None), (None, None), (None, None)))
    assert job.run(9).exit_code == 137
    assert job.tries == 2
    assert (
        job.said[-1]
        == "no restart: the job failed twice before its first step, with no new checkpoint in between"
    )


def test_a_host_that_comes_back_late_costs_attempts_but_no_same_step():
    """The preflight of a restart fails while the host boots; this is no failure of the step before it."""
    gone = LaunchError("n1 did not pass the preflight")
    job = Job(*failing((57, 50)), gone, gone, *failing((60, 50)), Ended(0, ""))
    assert job.run(9).exit_code == 0
    assert job.pauses == [1, 2, 4, 8]
    assert "from the checkpoint of step 50, after: n1 did not pass the preflight" in job.said[1]
    assert job.said[-1] == f"4 earlier attempts failed: {LOST}; n1 did not pass the preflight"
    stays = Job(*failing((57, 50)), gone, gone)
    assert stays.run(2).exit_code == 2 and stays.tries == 3


def test_the_same_step_is_recognised_over_a_missing_host_in_between():
    job = Job(*failing((57, 50)), LaunchError("n1 is away"), *failing((57, 50)), Ended(0, ""))
    assert job.run(9).step == 57 and job.tries == 3


def test_wrong_input_of_the_first_attempt_is_raised():
    job = Job(LaunchError("no host"))
    with pytest.raises(LaunchError, match="no host"):
        job.run(5)


def test_a_cause_that_the_ranks_have_printed_is_the_failure_above():
    job = Job(Ended(1, "", 1), Ended(0, ""))
    job.run(1)
    assert job.said[0].endswith("from the beginning, after: the failure above")


def test_a_cause_of_many_lines_is_announced_in_one():
    job = Job(Ended(1, f"{'x' * 300}\n  traceback", 1), Ended(0, ""))
    job.run(1)
    assert all("\n" not in line and len(line) < 300 for line in job.said)
