"""Rules over [monitor]: the steps that are profiled or traced, and the ranks that are profiled."""

from collections.abc import Iterator

from megalite.config.rules.batch import data_size
from megalite.config.sections.checked import CheckedRun
from megalite.errors import Problem
from megalite.topology.axes import Layout


def chosen_steps_are_of_the_run(run: CheckedRun) -> Iterator[Problem]:
    last, monitor = run.training.steps, run.monitor
    for key, steps in (("profile_steps", monitor.profile_steps), ("trace_steps", monitor.trace_steps)):
        if last is not None and (later := [step for step in steps if step > last]):
            message = f"step {later[0]} never comes: the last one is training.steps = {last}"
            yield Problem(f"monitor.{key}", message, f"use steps from 1 to {last}")


def profiled_ranks_are_of_the_run(run: CheckedRun) -> Iterator[str]:
    """A note: the run may go on with fewer ranks after a failure, which an error would prevent."""
    ranks = Layout.of(run.parallel, data_size(run)).world_size
    missing = [str(rank) for rank in run.monitor.profile_ranks if rank >= ranks]
    if run.monitor.profile_steps and missing:
        yield f"monitor.profile_ranks: there is no rank {' and no rank '.join(missing)}; the last one is {ranks - 1}"
