"""The idle share of a pipeline's time: by the schedules' published formulas, elsewhere by simulating their data."""

from functools import lru_cache

from megalite.topology.schedule_timeline import ideal_timeline
from megalite.topology.schedules import SCHEDULES


@lru_cache(maxsize=4096)
def bubble(name: str, stages: int, micro_batches: int, chunks: int) -> float:
    """Return the idle share of a step of equal stages, with a backward of two forwards; transfers take no time.

    Raises ValueError for numbers that the schedule does not run with.
    """
    if reason := SCHEDULES[name].problem(stages, micro_batches, chunks):
        raise ValueError(reason)
    formula = published_bubble(name, stages, micro_batches, chunks)
    if formula is not None:
        return formula
    simulated = SCHEDULES[name].repeating_micro_batches(stages, micro_batches)
    work = 3 * chunks  # of a micro batch on a stage
    length = ideal_timeline(name, stages, simulated, chunks).length + work * (micro_batches - simulated)
    return 1 - work * micro_batches / length


def published_bubble(name: str, stages: int, micro_batches: int, chunks: int) -> float | None:
    """Return the idle share by the schedule's published formula; None where it has none for these numbers.

    With p stages, M micro batches and m chunks a stage it is (p - 1) / (m M + p - 1) for GPipe (Huang et al. 2019),
    1F1B and interleaved 1F1B (Narayanan et al. 2021), and breadth-first (Lamy-Poirier 2023). A split backward, whose
    halves take as long as a forward, leaves (p - 1) (F + I - W) idle: (p - 1) / (3 m M + p - 1) for ZB-H1, its
    interleaved form, ZB-V (Qi et al. 2023, 2024) and DualPipe's half. Chunks and split backwards need full rounds of p
    micro batches, the latter two of them.
    """
    split = SCHEDULES[name].splits_backward
    whole_rounds = micro_batches % stages == 0 and micro_batches >= (2 if split else 1) * stages
    if not whole_rounds and (split or chunks > 1 or SCHEDULES[name].whole_rounds):
        return None
    idle = stages - 1
    return idle / ((3 if split else 1) * chunks * micro_batches + idle)
