"""A model computes the same numbers with compiled operators and with plain torch, with and without gradients."""

import pytest
import torch

from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.ops.choice import ALL_COMPILED, PLAIN_TORCH, Operators
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from tests.support.kernels import needs_library
from tests.support.parity import assert_close, assert_same_tensors
from tests.support.tiny import FAMILY_SHAPES, tiny_batch

pytestmark = needs_library


@pytest.mark.parametrize("shape", FAMILY_SHAPES.values(), ids=FAMILY_SHAPES)
def test_every_family(shape: ModelShape) -> None:
    batch = tiny_batch(shape, 2)

    def run(operators: Operators) -> dict[str, torch.Tensor]:
        options = ModelOptions(torch.float64, operators=operators)
        split = pipeline_split(shape.num_hidden_layers)
        stage = build_replica(shape, ParallelMesh.single(), split, options, seed=1).stage
        hidden = stage.whole.decode(batch.input_ids, batch.position_ids)
        hidden.square().sum().backward()
        with torch.no_grad():
            assert_close(stage.whole.decode(batch.input_ids, batch.position_ids), hidden)
        grads = {name: each.grad for name, each in stage.named_parameters() if each.grad is not None}
        return grads | {"hidden states": hidden.detach()}

    assert_same_tensors(run(ALL_COMPILED), run(PLAIN_TORCH))
