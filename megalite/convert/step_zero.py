"""Weights from elsewhere as a run's first checkpoint: step 0, without optimizer state."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.failures import Remedies
from megalite.checkpoint.save import save_checkpoint
from megalite.convert.new_run import imported_folders, require_new_run, undone_on_failure
from megalite.model.replica import Replica
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from megalite.topology.state import NoOptimizer

_REMEDIES = Remedies(
    full="free space there or name a RUN folder on another disk",
    forbidden="make it writable or name another RUN folder",
)


def write_step_zero(
    run_folder: Path,
    shape: ModelShape,
    fill: Callable[[Replica], None],
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> Path:
    """The checkpoint of a model that `fill` has filled; one process, which holds the model once.

    fill: may write the run's tokenizer too. Raises CheckpointError where the run has a checkpoint already, and whatever
    `fill` raises; nothing that was written is left then.
    """
    require_new_run(run_folder)
    mesh, split = ParallelMesh.single(), pipeline_split(shape.num_hidden_layers)
    folder = run_folder / "checkpoints"
    with undone_on_failure(*imported_folders(run_folder)):
        replica = build_replica(shape, mesh, split, seed=None)
        replica.stage.to(dtype)
        fill(replica)
        return save_checkpoint(
            folder,
            replica,
            NoOptimizer(),
            trainer_state={"step": 0, "samples": 0, "tokens": 0},
            config=config,
            remedies=_REMEDIES,
        )
