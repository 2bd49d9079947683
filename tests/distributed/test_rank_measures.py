"""The share of communication counts what others wait for a slow rank, by kind; the rank itself is named."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.launcher.control.progress import progress
from megalite.launcher.rank.detect import RankInfo
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.train.step.rank_measures import RankMeasures, RankReport
from megalite.train.step.state import StepReport
from tests.support.selection import cases
from tests.support.tiny_run import tiny_trainer, write_token_files
from tests.support.waiting import PATIENCE

LATE = 0.1
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "data 2": ("data", {"parallel.data": 2}),
    "tensor 2": ("tensor", {"parallel.tensor": 2}),
    "sequence 2": ("tensor", {"parallel.tensor": 2, "parallel.sequence": "true"}),
    "pipeline 2": ("pipeline", {"parallel.pipeline": 2}),
    "ZeRO 1": ("data", {"parallel.data": 2, "deepspeed.zero_optimization.stage": 1}),
}


def info_of(mesh: ParallelMesh) -> RankInfo:
    world = mesh.layout.world_size
    return RankInfo(mesh.rank, world, mesh.rank, world, "", 0, "megalite", f"host-{mesh.rank // 2}")


def late_by(folder: Path, changes: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Make two steps, in the second of which rank 1 is late; return the second one's seconds and record.

    Rank 1 sleeps once rank 0 waits for it.
    """
    trainer, _ = tiny_trainer(folder, changes)
    mesh, waits, forward_backward, wait = (
        trainer.mesh,
        folder / "rank-0-waits",
        trainer.pipeline.forward_backward,
        progress.wait,
    )
    measures = RankMeasures(mesh, info_of(mesh))
    measured: tuple[float, dict[str, Any]] = (0.0, {})

    @contextmanager
    def noted(role: str) -> Iterator[None]:
        with wait(role):
            waits.touch()
            yield

    def late(*arguments: Any) -> Any:
        until = time.monotonic() + PATIENCE
        while not waits.exists() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(LATE)
        return forward_backward(*arguments)

    for number in (1, 2):
        if number == 2:
            if mesh.rank == 0:
                progress.wait = noted  # type: ignore[method-assign]
            else:
                trainer.pipeline.forward_backward = late  # type: ignore[method-assign]
        try:
            with measures.step():
                report = trainer.train_step()
        finally:
            progress.wait = wait  # type: ignore[method-assign]
        measures.add(report, disturbed=False)
        measured = report.step_seconds, measures.report().record
    return measured


@pytest.mark.parametrize("name", cases(LAYOUTS, core=("data 2", "tensor 2", "pipeline 2")))
def test_others_wait_for_a_late_rank_as_long_as_it_is_late(ranks, tmp_path, name):
    kind, changes = LAYOUTS[name]
    write_token_files(tmp_path)
    changes = {"training.precision": "fp32", "training.steps": 3, **changes}
    (seconds, record), (_, same) = ranks.run(late_by, 2, folder=tmp_path, changes=changes)
    assert record == same
    assert record["communication_share_max"] * seconds >= LATE
    # The mean of a rank that waited for all of it and of another.
    assert 2 * record[f"communication_share/{kind}"] * seconds >= LATE
    assert record["communication_share"] <= record["communication_share_max"] <= 1


def reports_of(work: list[list[float]], disturbed: list[int]) -> list[RankReport]:
    """Report the seconds of each rank's work, step by step. disturbed: steps, counted from 0."""
    layout = Layout(pipeline=2, data=2)
    mesh = ParallelMesh.over_world(layout)
    measures, reports = RankMeasures(mesh, info_of(mesh)), []
    usual = StepReport(1, 1.0, 1.0, 0.1, 1, 1, 1, step_seconds=9.0, data_seconds=0.0)
    for step, seconds in enumerate(work):
        measures.add(replace(usual, step_seconds=seconds[mesh.rank]), disturbed=step in disturbed)
        reports.append(measures.report())
    return reports


def test_a_slow_rank_is_named_with_its_host_and_place_until_it_recovers(ranks):
    even, slow = [1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 5.0]
    work = [even] * 6 + [slow] * 4 + [even] * 4
    first, *others = ranks.run(reports_of, 4, work=work, disturbed=[])
    assert {step: text for step, report in enumerate(first) for text in report.warnings} == {
        8: "rank 3 (pp 1, dp 1, tp 0) on host-1 is slow: its own work takes 5 s a step, "
        "2.5 times as long as that of the other ranks of its stage"
    }
    notes = {step: text for step, report in enumerate(first) for text in report.notes}
    assert notes == {
        12: "rank 3 (pp 1, dp 1, tp 0) on host-1 is as fast as the other ranks of its stage again"
    }
    assert [step for step, report in enumerate(first) if report.record.get("slow_rank") == 3] == [
        8,
        9,
        10,
        11,
    ]
    # Rank 0 alone speaks.
    assert not any(report.warnings or report.notes for reports in others for report in reports)
    quiet, *_ = ranks.run(reports_of, 4, work=work, disturbed=[6, 7, 8, 9])
    assert not any(report.warnings for report in quiet)


def test_one_process_has_no_communication() -> None:
    mesh = ParallelMesh.single(torch.device("cpu"))
    measures = RankMeasures(mesh, RankInfo(0, 1, 0, 1, "", 0, "megalite", "here"))
    with measures.step():
        assert progress.communication is None
    measures.add(StepReport(1, 1.0, 1.0, 0.1, 1, 1, 1, 1.0, 0.0), disturbed=False)
    assert measures.report().record == {}
