"""Our orders, written from the papers, are those that torch.distributed.pipelining says it runs, and our rules are its.

No process and no model: torch makes its plan from the numbers of stages alone. tests/distributed/test_schedules.py
compares the actions on real ranks.
"""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from megalite.topology.schedules import SCHEDULES, Action
from tests.unit.topology.test_schedules import Case

# Classes that take one stage, then those that take a list of stages.
SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, Any] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
STAGES, MICRO_BATCHES = range(1, 9), range(1, 25)


def torch_orders(name: str, size: Case) -> list[tuple[Action, ...]]:
    """Raises ValueError where torch refuses the size."""
    stages, micro_batches, chunks = size
    held: list[Any] = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=stages * chunks,
            group_size=stages,
            group_rank=0,
            submod=None,
            has_backward=True,
        )
        for stage in range(0, stages * chunks, stages)
    ]
    arguments: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": lambda output, target: output}
    if name in SINGLE:
        order = SINGLE[name](held[0], **arguments)._get_pipeline_order()
        assert order is not None
    else:
        order = MULTI[name](held, **arguments).pipeline_order
    return [tuple(filter(None, map(our_action, parts(order[stage])))) for stage in range(stages)]


def parts(order: list[Any]) -> list[Any]:
    """torch's overlapped pairs taken apart, its waits left out."""
    return [part for action in order if action is not None for part in action.sub_actions or (action,)]


def our_action(action: Any) -> Action | None:
    """None for what is no computation: the division of gradients, which we have switched off."""
    kind = action.computation_type.value
    if kind == "REDUCE_GRAD":
        return None
    return Action(kind, action.stage_index, action.microbatch_index)


def chunk_numbers(name: str) -> list[int]:
    """Those to try: wrong ones too, but not where torch's class takes a stage and no list."""
    return [1] if name in SINGLE else [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "chunks"), [(name, each) for name in SCHEDULES for each in chunk_numbers(name)]
)
def test_orders_and_rules_are_those_of_torch(name: str, chunks: int) -> None:
    schedule = SCHEDULES[name]
    for stages, micro_batches in product(STAGES, MICRO_BATCHES):
        size = (stages, micro_batches, chunks)
        reason = schedule.problem(*size)
        if reason is not None:
            with pytest.raises(ValueError, match=r"requires|must be greater"):
                torch_orders(name, size)
            continue
        for stage, theirs in enumerate(torch_orders(name, size)):
            ours = schedule.order(stage, *size)
            if name == "1f1b" and stage == stages - 1:
                # torch 2.13 describes its last stage's forwards as 1 to M, and runs 0 to M - 1. Should this fail
                # with a later torch, it has been mended: take the exception out.
                theirs = tuple(
                    Action(each.kind, each.chunk, each.micro_batch - (each.kind == "F")) for each in theirs
                )
            assert ours == theirs, (size, stage)
