"""A replica's stage has exactly the parameters of the topology, whoever fills it."""

import pytest
import torch

from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.stages import pipeline_split
from tests.support.replicas import whole_replica
from tests.support.tiny import tiny_shape

SHAPE = tiny_shape(layers=2)


def test_a_stage_with_other_parameters_is_refused_by_name():
    built = build_replica(SHAPE, ParallelMesh.single(), pipeline_split(2), seed=None)
    built.stage.register_parameter("spare", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(AssertionError, match="spare"):
        whole_replica(built.stage)


def test_a_parameter_of_another_shape_is_refused_by_name():
    stage = build_replica(SHAPE, ParallelMesh.single(), pipeline_split(2), seed=None).stage
    norm = stage.get_parameter("model.norm.weight")
    norm.data = norm.data[:-1]
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        whole_replica(stage)
