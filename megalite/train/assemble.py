"""Puts together what trains: the replica, its optimizer and its pipeline. Knows no configuration file.

Production, tests and benchmarks all train what this function returns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megalite.model.options import ModelOptions
from megalite.model.replica import Replica
from megalite.model.stages import build_replica
from megalite.ops.choice import TORCH
from megalite.parallel.gradient_sums import WeightGradients
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.objective import NEXT_TOKEN, Objective
from megalite.parallel.pipeline import PipelineRunner, PipelineShapes
from megalite.topology.schedules import SCHEDULES
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit
from megalite.train.optimizer.protocol import Optimizer
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.optimizer.torch import TorchOptimizer


@dataclass(frozen=True)
class StepSchedule:
    """How the micro batches of a step run through the stages: a name of topology.schedules, and their number."""

    name: str = "1f1b"
    micro_batches: int = 1


@dataclass(frozen=True)
class TrainingPlan:
    """The model of a run, its optimizer, its schedule and its objective.

    deepspeed: DeepSpeed's JSON with ZeRO 1 to 3; None for the optimizer of torch alone.
    """

    shape: ModelShape
    split: PipelineSplit
    options: ModelOptions
    settings: OptimizerSettings
    schedule: StepSchedule = StepSchedule()
    objective: Objective = NEXT_TOKEN
    deepspeed: Mapping[str, Any] | None = None


def assemble(
    plan: TrainingPlan,
    mesh: ParallelMesh,
    *,
    seed: int | None,
    prepare: Callable[[Replica], None] = lambda replica: None,
) -> tuple[Replica, Optimizer, PipelineRunner]:
    """This rank's share of the model, its optimizer, and the pipeline that runs it; every rank of `mesh` calls it.

    seed: of the initial weights; None leaves them to `prepare`.
    prepare: called with the replica before the optimizer copies its weights and registers its hooks.
    """
    shape, split, options, schedule = plan.shape, plan.split, plan.options, plan.schedule
    # ZeRO reads gradients in the middle of a step: autograd sums them.
    in_place = (
        plan.deepspeed is None
        and plan.settings.training.accumulation == "fp32"
        and options.operators.of("accumulate") != TORCH
    )
    gradients = WeightGradients(
        options.operators.accumulate if in_place else None,
        deferrable=split.stages > 1 and SCHEDULES[schedule.name].splits_backward,
    )
    options = replace(options, weight_gradients=gradients)
    replica = build_replica(shape, mesh, split, options, seed=seed)
    prepare(replica)
    settings = replace(plan.settings, operators=options.operators)
    optimizer = _optimizer(replica, settings, plan.deepspeed)
    forward = optimizer.wrap(replica.stage)
    pipeline = PipelineRunner(
        [forward] if split.stages == 1 else replica.stage.chunks,
        split,
        mesh,
        PipelineShapes(schedule.micro_batches, shape.hidden_size, options.dtype, schedule.name),
        buckets=optimizer.buckets,
        objective=plan.objective,
    )
    return replica, optimizer, pipeline


def _optimizer(
    replica: Replica, settings: OptimizerSettings, deepspeed: Mapping[str, Any] | None
) -> Optimizer:
    if deepspeed is None:
        return TorchOptimizer(replica, settings)
    # DeepSpeed costs seconds to import: only a run that uses it pays.
    from megalite.train.optimizer.deepspeed import DeepSpeedOptimizer

    return DeepSpeedOptimizer(replica, settings, deepspeed)
