"""No module is called with a parameter: DeepSpeed detaches such a tensor, and under ZeRO 3 backward keeps it whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.step_batch import StepBatch
from megalite.topology.adapter import PROJECTIONS, Lora
from megalite.topology.stages import pipeline_split
from tests.support.tiny import FAMILY_SHAPES


@pytest.mark.parametrize("adapter", [None, Lora(2, 4.0, PROJECTIONS, dora=True)], ids=["none", "lora"])
def test_no_module_is_called_with_a_parameter(adapter: Lora | None) -> None:
    shape = replace(FAMILY_SHAPES["llama with biases"], adapter=adapter)
    split = pipeline_split(shape.num_hidden_layers)
    stage = build_replica(shape, ParallelMesh.single(), split, seed=1).stage
    parameters = {tensor.data_ptr() for tensor in stage.parameters()}
    called_with: list[str] = []

    def look(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [each for each in (*arguments, *named.values()) if isinstance(each, Tensor)]
        if any(each.data_ptr() in parameters for each in tensors):
            called_with.append(type(module).__name__)

    for module in stage.modules():
        module.register_forward_pre_hook(look, with_kwargs=True)
    ids = torch.arange(12).view(2, 6)
    positions = torch.arange(6).expand(2, 6)
    mask, samples = torch.ones(2, 6), torch.arange(2)
    stage(ids, batch=StepBatch(ids, positions, ids, mask, samples))
    assert not called_with
