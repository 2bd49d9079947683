"""Weights from elsewhere as a run's first checkpoint: step 0, without optimizer state."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.folder import require_new_run
from megalite.checkpoint.save import save_checkpoint
from megalite.model.stages import build_stage
from megalite.model.transformer import Stage
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.layout import pipeline_split
from megalite.topology.parameters import ModelShape
from megalite.topology.state import NoOptimizer


def write_step_zero(
    run_folder: Path,
    shape: ModelShape,
    fill: Callable[[Stage], None],
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> Path:
    """The checkpoint of a stage that `fill` has filled; one process, which holds the model once.

    Raises CheckpointError where the run has a checkpoint already, and whatever `fill` raises.
    """
    require_new_run(run_folder)
    mesh, split = ParallelMesh.single(), pipeline_split(shape.num_hidden_layers)
    stage = build_stage(shape, mesh, split, seed=None).to(dtype)
    fill(stage)
    return save_checkpoint(
        run_folder / "checkpoints",
        mesh=mesh,
        shape=shape,
        split=split,
        stage=stage,
        optimizer=NoOptimizer(),
        trainer_state={"step": 0, "samples": 0, "tokens": 0},
        config=config,
    )
