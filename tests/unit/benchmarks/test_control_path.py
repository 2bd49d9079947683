"""The work of one rank does not grow with the number of ranks: operations are counted, not seconds."""

import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.control_path import Crowd, layout_of, mesh, places, sampler, share, tokens
from megalite.launcher.control.coordinator import Coordinator
from megalite.launcher.control.messages import Verdict
from megalite.launcher.control.rank_states import CoordinatedJob
from megalite.parallel.mesh import disconnect
from megalite.topology.axes import Layout
from tests.support.jobs import ROOT

# Not torch, which has a table of all ranks.
_COUNTED = tuple(str(ROOT / folder) for folder in ("megalite", "benchmarks", "tests"))
FEW, MANY = layout_of(8), layout_of(128)


class Operations:
    """Counts the bytecode operations of this repository's code in the `with` block, in this thread."""

    def __enter__(self) -> "Operations":
        self.count, self._before = 0, sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_COUNTED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += event == "opcode"
        return self._step


def operations(step: Callable[[Layout], object], layout: Layout) -> int:
    with Operations() as counted:
        step(layout)
    return counted.count


def per_added_rank(step: Callable[[Layout], object]) -> float:
    """Return the operations that a step needs more for each rank that is added to the job; caches are filled."""
    step(FEW)
    more = operations(step, MANY) - operations(step, FEW)
    return more / (MANY.world_size - FEW.world_size)


def groups(layout: Layout) -> None:
    try:
        mesh(layout)
    finally:
        disconnect()


def test_a_loop_over_all_ranks_is_noticed() -> None:
    assert per_added_rank(lambda layout: [None for _ in range(layout.world_size)]) > 2


@pytest.mark.parametrize("step", [places, groups, share], ids=lambda step: step.__name__)
def test_a_step_of_one_rank_does_less_than_one_operation_for_each_added_rank(
    step: Callable[[Layout], object],
) -> None:
    assert operations(step, FEW) > 1000
    assert per_added_rank(step) < 1


def test_the_batch_of_a_rank_is_found_without_those_of_the_others(tmp_path: Path) -> None:
    tokens(tmp_path)
    assert per_added_rank(lambda layout: sampler(layout, tmp_path)) < 1


def test_a_rank_makes_as_many_groups_however_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    new_group = dist.new_group

    def noted(ranks: list[int], **settings: Any) -> Any:
        made.append(len(ranks))
        return new_group(ranks, **settings)

    monkeypatch.setattr(dist, "new_group", noted)
    groups(FEW)
    few, made[:] = len(made), []
    groups(MANY)
    assert len(made) == few == 6 and max(made) == MANY.data


def operations_of_coordinator(ranks: int) -> float:
    """Return the operations of a coordinator for each rank of a job that meets, agrees and ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    serving = Coordinator(listener, CoordinatedJob(ranks), say=lambda line: None)

    def people() -> None:
        crowds = []
        for rank in range(ranks):
            crowds.append(Crowd(range(rank, rank + 1), ranks, serving.address))
            crowds[-1].hear("joined")  # so that the coordinator wakes for each
        for crowd in crowds:
            crowd.say("facts", name="start", about="", facts='{"run.seed": "1"}')
        for crowd in crowds:
            crowd.hear("value")
        serving.end(Verdict("over", 1))
        for crowd in crowds:
            crowd.hear("verdict")
            crowd.leave()

    thread = threading.Thread(target=people)
    thread.start()
    with Operations() as counted:
        serving.serve()
    thread.join()
    assert serving.verdict is not None and serving.verdict.text == "over"
    return counted.count / ranks


def test_the_coordinators_work_for_a_rank_does_not_grow_with_the_ranks() -> None:
    assert operations_of_coordinator(512) < 2 * operations_of_coordinator(32)
