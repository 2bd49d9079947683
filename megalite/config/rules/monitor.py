"""Rules over [monitor]: steps that are profiled or traced, ranks that are profiled, settings of sinks that are off."""

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
            right = {f"monitor.{key}": [step for step in steps if step <= last]}
            yield Problem(f"monitor.{key}", message, f"use steps from 1 to {last}", right)


def profiled_ranks_are_of_the_run(run: CheckedRun) -> Iterator[str]:
    """A note: the run may go on with fewer ranks after a failure, which an error would prevent."""
    ranks = Layout.of(run.parallel, data_size(run)).world_size
    missing = [str(rank) for rank in run.monitor.profile_ranks if rank >= ranks]
    if run.monitor.profile_steps and missing:
        yield f"monitor.profile_ranks: there is no rank {' and no rank '.join(missing)}; the last one is {ranks - 1}"


_SETTINGS_OF_SINKS = {
    "project": ("wandb", "mlflow"),
    "run_name": ("wandb", "mlflow"),
    "entity": ("wandb",),
    "group": ("wandb",),
    "log_checkpoints": ("wandb", "mlflow"),
    "tensorboard_folder": ("tensorboard",),
    "csv_folder": ("csv",),
}


def settings_of_sinks_that_are_off(run: CheckedRun) -> Iterator[str]:
    """A note: a flag can switch the sinks off for one start, and the file keeps its names."""
    for key, sinks in _SETTINGS_OF_SINKS.items():
        if getattr(run.monitor, key) and not set(sinks) & set(run.monitor.report_to):
            words = " or ".join(f'"{sink}"' for sink in sinks)
            yield f"monitor.{key} has no effect without {words} in monitor.report_to"


def copies_are_compared(run: CheckedRun) -> Iterator[str]:
    """A note: the run may go on with fewer ranks, or another ZeRO stage, and its file keeps the setting."""
    if not run.monitor.self_check_every:
        return
    layout = Layout.of(run.parallel, data_size(run))
    if run.zero_stage == 3:
        yield "monitor.self_check_every compares nothing: ZeRO 3 keeps one copy of each weight"
    elif layout.world_size == layout.pipeline:
        yield "monitor.self_check_every compares nothing: in this layout each weight has one copy"
