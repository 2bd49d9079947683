"""Rules over the pipeline: chunks per stage, layers per chunk, and the micro batches its schedule needs."""

from collections.abc import Iterator
from typing import Any, Literal

from megalite.config.rules.batch import BatchProblem, plan_batch
from megalite.config.sections.checked import CheckedRun, Unknown
from megalite.config.sections.derived import vocabulary
from megalite.config.sections.shape_settings import model_shape
from megalite.config.sections.training_section import BatchPlan
from megalite.errors import Problem
from megalite.topology.balance import balanced_layers
from megalite.topology.flops import forward_flops
from megalite.topology.schedules import SCHEDULES, Schedule
from megalite.topology.stages import PipelineSplit, pipeline_split

_PLAIN = {"parallel.schedule": "1f1b", "parallel.virtual_stages": "auto"}


def chunks_per_stage(run: CheckedRun) -> int:
    """Return parallel.virtual_stages; for "auto" the schedule's default, or 1 with a single stage.

    Raises Unknown if the schedule does not run that number of chunks.
    """
    stages, schedule = run.parallel.pipeline, SCHEDULES[run.parallel.schedule]
    chunks = run.parallel.virtual_stages
    if chunks == "auto":
        return schedule.default_chunks if stages > 1 else 1
    if not (chunks == 1 if stages == 1 else schedule.takes_chunks(chunks)):
        raise Unknown("parallel.virtual_stages")
    return chunks


def layers_per_chunk(run: CheckedRun) -> tuple[int, ...] | None:
    """Return parallel.layers_per_stage, None for equal numbers; for "auto" those that make equal work.

    Raises Unknown if the work is not known.
    """
    layers: tuple[int, ...] | Literal["auto"] | None = run.parallel.layers_per_stage
    if layers != "auto":
        return layers
    rows = vocabulary(run)
    if rows is None:
        raise Unknown("model.vocab_size")
    flops = forward_flops(model_shape(run.model, rows), run.training.sequence_length)
    try:
        return balanced_layers(
            flops.layers,
            flops.head,
            run.parallel.pipeline,
            chunks_per_stage=chunks_per_stage(run),
            v_shaped=SCHEDULES[run.parallel.schedule].v_shaped,
        )
    except ValueError:
        raise Unknown("parallel.pipeline") from None


def split_of(run: CheckedRun) -> PipelineSplit | None:
    """Return which layers each stage holds; None where that is the problem of another rule."""
    try:
        return pipeline_split(
            run.model.num_hidden_layers,
            run.parallel.pipeline,
            chunks_per_stage=chunks_per_stage(run),
            v_shaped=SCHEDULES[run.parallel.schedule].v_shaped,
            layers_per_chunk=layers_per_chunk(run),
        )
    except ValueError:
        return None


def balanced_layers_know_the_vocabulary(run: CheckedRun) -> Iterator[Problem]:
    if run.parallel.layers_per_stage == "auto" and vocabulary(run) is None:
        message = '"auto" needs the size of the vocabulary, which decides what the head costs'
        yield Problem(
            "parallel.layers_per_stage", message, "set model.vocab_size or tokenizer.vocab_size to a number"
        )


def chunks_suit_the_schedule(run: CheckedRun) -> Iterator[Problem]:
    key, chosen = "parallel.virtual_stages", run.parallel.virtual_stages
    schedule = SCHEDULES[run.parallel.schedule]
    if chosen == "auto":
        return
    if run.parallel.pipeline == 1:
        if chosen > 1:
            message = f"{chosen} chunks per stage need at least 2 stages, but parallel.pipeline is 1"
            yield Problem.reset(key, message, 'use "auto", or parallel.pipeline 2 or more', "auto")
    elif not schedule.takes_chunks(chosen):
        chunks = f"{schedule.only_chunks} chunk{'s' * (schedule.only_chunks != 1)} per stage"
        message = f'is {chosen}, but parallel.schedule "{schedule.name}" runs {chunks}'
        other = _nearest_schedule(schedule, run, chosen)
        yield Problem.reset(key, message, f'use "auto", or parallel.schedule "{other}"', "auto")


def every_chunk_has_a_layer(run: CheckedRun) -> Iterator[Problem]:
    stages, chunks, layers = run.parallel.pipeline, chunks_per_stage(run), run.model.num_hidden_layers
    if stages * chunks <= layers:
        return
    pieces = f"{stages} stages"
    if chunks > 1:
        pieces += f" * parallel.virtual_stages {chunks} = {stages * chunks} chunks"
    message = f"{pieces} cannot each have one of model.num_hidden_layers = {layers}"
    most, fewer = layers // chunks, layers // stages
    ways: dict[str, dict[str, Any]] = {}
    if most > 1 or chunks == 1:
        ways[f"at most {most}"] = {"parallel.pipeline": most}
    if fewer and SCHEDULES[run.parallel.schedule].takes_chunks(fewer):
        ways[f"parallel.virtual_stages {fewer}"] = {"parallel.virtual_stages": fewer}
    elif fewer:
        ways['parallel.schedule "1f1b"'] = _PLAIN
    if not ways:
        ways[f'at most {layers} and parallel.schedule "1f1b"'] = {"parallel.pipeline": layers, **_PLAIN}
    yield Problem("parallel.pipeline", message, f"use {', or '.join(ways)}", next(iter(ways.values())))


def layers_per_stage_cover_the_model(run: CheckedRun) -> Iterator[Problem]:
    counts, key = run.parallel.layers_per_stage, "parallel.layers_per_stage"
    if counts is None or counts == "auto":
        return
    stages, chunks, layers = run.parallel.pipeline, chunks_per_stage(run), run.model.num_hidden_layers
    if len(counts) != stages * chunks:
        message = f"has {len(counts)} numbers, but parallel.pipeline is {stages}"
        if chunks > 1:
            message = f"has {len(counts)} numbers, but parallel.pipeline {stages} * parallel.virtual_stages {chunks} = "
            message += f"{stages * chunks} chunks"
        yield Problem.reset(key, message, f"give {stages * chunks} numbers")
    if sum(counts) != layers:
        message = (
            f"{' + '.join(map(str, counts)) or 0} = {sum(counts)} is not model.num_hidden_layers = {layers}"
        )
        yield Problem.reset(key, message, f"give numbers whose sum is {layers}")


def schedule_has_micro_batches(run: CheckedRun) -> Iterator[Problem]:
    schedule, stages, chunks = (
        SCHEDULES[run.parallel.schedule],
        run.parallel.pipeline,
        chunks_per_stage(run),
    )
    plan = _batch(run)
    # With one stage every schedule is gradient accumulation.
    if plan is None or stages == 1:
        return
    if reason := schedule.problem(stages, plan.micro_batches, chunks):
        nearest = schedule.nearest_micro_batches(stages, plan.micro_batches, chunks)
        total = plan.micro_batch_size * nearest * plan.data
        remedy = (
            f"use {nearest} (training.global_batch_size {total}), "
            f'or parallel.schedule "{_nearest_schedule(schedule, run, chunks)}"'
        )
        cure = {"training.micro_batches": nearest, "training.global_batch_size": total}
        yield Problem("training.micro_batches", reason, remedy, cure)


def _nearest_schedule(schedule: Schedule, run: CheckedRun, chunks: int) -> str:
    """Return the most similar schedule among those that run these chunks and the run's micro batches."""
    plan, stages = _batch(run), run.parallel.pipeline
    fitting = [
        other
        for other in SCHEDULES.values()
        if other.takes_chunks(chunks)
        and (plan is None or not other.problem(stages, plan.micro_batches, chunks))
    ]
    traits = (schedule.splits_backward, schedule.v_shaped)
    unlike = {
        other.name: (other.splits_backward != traits[0], other.v_shaped != traits[1]) for other in fitting
    }
    return min(unlike, key=lambda name: unlike[name])


def _batch(run: CheckedRun) -> BatchPlan | None:
    """Return the batch sizes; None if they are wrong, which another rule reports."""
    try:
        return plan_batch(run)
    except (BatchProblem, Unknown):
        return None
