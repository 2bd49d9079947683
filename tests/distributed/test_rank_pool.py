"""The pool of ranks: order, first causes, deadlocks, recovery, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ranks import RankFailed, RankPool, RanksHung
from tests.support.waiting import soon, wait_until

ROOT = Path(__file__).parents[2]


def rank_times(factor: int) -> tuple[int, int, float]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank() * factor, os.getpid(), total.item()


def fail_on(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError("the first cause")
    dist.all_reduce(torch.ones(1))


def fail_before_others_can_see(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError("nobody is told")
    time.sleep(600)


def wait_for_rank(absent: int) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() != absent:
        dist.all_reduce(torch.ones(1))


def die_on(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def leave_settings_changed() -> tuple[float, str, bool]:
    import torch

    seen = torch.rand(1).item(), str(torch.get_default_dtype()), torch.is_grad_enabled()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return seen


def return_tensor_and_lambda(pickles: bool) -> object:
    import torch

    if not pickles:
        return lambda: None
    weight = torch.ones(3, requires_grad=True)
    return {"sum": weight * 2, "float64": torch.zeros(2, dtype=torch.float64)}


def arrive_late() -> int:
    time.sleep(1.5)
    return 7


class Late:
    """A value that takes longer to arrive than its task may take."""

    def __reduce__(self) -> tuple[object, ...]:
        return arrive_late, ()


def same(value: int) -> int:
    return value


def zero_one_step() -> list[float]:
    """Three SGD steps of DeepSpeed's ZeRO-1 on a line; the weights after each."""
    import deepspeed
    import torch
    import torch.distributed as dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 0.0,  # DeepSpeed clips at 1.0 unless told not to
            "zero_allow_untested_optimizer": True,
        },
    )
    weights = []
    for _ in range(3):
        loss = engine(torch.full((1, 1), float(dist.get_rank() + 1))).sum()
        engine.backward(loss)
        engine.step()
        weights.append(model.weight.item())
    return weights


def test_results_come_back_in_rank_order(ranks: RankPool) -> None:
    results = ranks.run(rank_times, world_size=4, factor=10)
    assert [result[0] for result in results] == [0, 10, 20, 30]
    assert len({result[1] for result in results}) == 4
    assert {result[2] for result in results} == {6.0}


def test_processes_are_reused_and_groups_are_not(ranks: RankPool) -> None:
    before = [pid for _, pid, _ in ranks.run(rank_times, world_size=3, factor=1)]
    assert [pid for _, pid, _ in ranks.run(rank_times, world_size=2, factor=1)] == before[:2]
    assert [total for *_, total in ranks.run(rank_times, world_size=1, factor=1)] == [0.0]


def test_no_setting_outlives_a_call(ranks: RankPool) -> None:
    first, second = (ranks.run(leave_settings_changed)[0] for _ in range(2))
    assert first == second
    assert first[1:] == ("torch.float32", True)


def test_tensors_come_back_as_tensors(ranks: RankPool) -> None:
    [result] = ranks.run(return_tensor_and_lambda, pickles=True)
    assert result["sum"].tolist() == [2.0] * 3
    assert str(result["float64"].dtype) == "torch.float64"


def test_a_result_that_does_not_pickle_is_that_ranks_failure(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 of 1 failed first: .*pickle"):
        ranks.run(return_tensor_and_lambda, pickles=False)


@pytest.mark.parametrize("culprit", [0, 2])
def test_the_first_cause_is_reported_first(ranks: RankPool, culprit: int) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        ranks.run(fail_on, world_size=3, rank=culprit)
    first, *rest = str(caught.value).splitlines()
    assert first == f"rank {culprit} of 3 failed first: ValueError: the first cause"
    assert any("in fail_on" in line for line in rest)
    followers = sorted(line.split(":")[0] for line in rest if line.startswith("then"))
    assert followers == [f"then rank {rank}" for rank in range(3) if rank != culprit]
    assert time.monotonic() - started < soon(5)
    assert len(ranks.run(rank_times, world_size=3, factor=1)) == 3


def test_a_failure_that_the_others_cannot_notice_ends_the_call_too(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.ranks.GRACE_SECONDS", 0.5)
    with pytest.raises(RankFailed, match="rank 1 of 2 failed first: ValueError") as caught:
        ranks.run(fail_before_others_can_see, world_size=2, rank=1)
    assert "rank 0: was still waiting, and was killed" in str(caught.value)
    monkeypatch.undo()
    assert len(ranks.run(rank_times, world_size=2, factor=1)) == 2


def test_a_deadlock_names_the_ranks_that_hang_and_the_next_call_works(ranks: RankPool) -> None:
    with pytest.raises(RanksHung) as caught:
        ranks.run(wait_for_rank, world_size=3, timeout=1, absent=1)
    message = str(caught.value)
    assert message.startswith("ranks 0, 2 of 3 did not end within 1 s\nrank 1 returned\n")
    assert message.count("in wait_for_rank") == 2
    assert "in all_reduce" in message
    started = time.monotonic()
    assert [result[0] for result in ranks.run(rank_times, world_size=3, factor=1)] == [0, 1, 2]
    assert time.monotonic() - started < soon(10)


def test_the_time_of_a_task_begins_when_all_ranks_have_joined(ranks: RankPool) -> None:
    assert ranks.run(same, world_size=2, timeout=1, value=Late()) == [7, 7]


def test_a_dead_rank_is_the_first_cause(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 failed first: the process died: SIGKILL"):
        ranks.run(die_on, world_size=2, rank=1)
    assert len(ranks.run(rank_times, world_size=2, factor=1)) == 2


def test_deepspeed_engines_work_in_reused_workers(ranks: RankPool) -> None:
    # The gradient is the mean input, (n + 1) / 2 over n ranks.
    for world_size, gradient in ((2, 1.5), (1, 1.0), (3, 2.0), (2, 1.5)):
        for weights in ranks.run(zero_one_step, world_size=world_size):
            assert weights == [1 - 0.5 * gradient * step for step in (1, 2, 3)]


ORPHANS = """
import sys, time
from tests.support.ranks import RankPool
from tests.distributed.test_rank_pool import rank_times, wait_for_rank
if __name__ == "__main__":
    pool = RankPool()
    pool.run(rank_times, world_size=2, factor=1)
    print(*pool.process_ids(), flush=True)
    pool.run(wait_for_rank, world_size=2, timeout=60, absent=1)
"""


@pytest.mark.extended
def test_no_worker_outlives_a_test_run_that_was_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", ORPHANS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(0.3)  # rank 0 is in a collective that nobody joins
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "workers outlive it")
