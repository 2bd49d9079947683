"""The replica of one process."""

from megalite.model.replica import Replica
from megalite.model.transformer import Stage
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.stages import pipeline_split


def whole_replica(stage: Stage) -> Replica:
    """Return the replica of a stage that one process holds whole."""
    mesh = ParallelMesh.single(next(stage.parameters()).device)
    return Replica(stage.shape, pipeline_split(stage.shape.num_hidden_layers), mesh, stage)
