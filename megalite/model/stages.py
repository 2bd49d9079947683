"""Builds this rank's stage of a model and gives every parameter its initial value by name."""

from collections.abc import Iterable

import torch

from megalite.model.lora import set_magnitudes
from megalite.model.options import PLAIN, ModelOptions
from megalite.model.replica import Replica
from megalite.model.transformer import Stage
from megalite.parallel.int8 import hold_int8
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.random import normal_slice
from megalite.topology.parameters import Parameter
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit


def build_replica(
    shape: ModelShape,
    mesh: ParallelMesh,
    split: PipelineSplit,
    options: ModelOptions = PLAIN,
    *,
    seed: int | None,
    int8: bool = False,
) -> Replica:
    """This rank's share of a new model, on the mesh's device.

    seed: initial weights are a function of the seed and of the parameter's name, equal in every layout; None leaves
    the weights unset, to be loaded.
    int8: the linears of the layers have int8 weights, to be loaded, and no parameter of theirs but biases.
    """
    replica = Replica(shape, split, mesh, Stage(shape, split, mesh, options))
    tensors = replica.tensors
    for parameter in replica.parameters:
        tensors[parameter.name].requires_grad_(parameter.trained)
        replica.unset.add(parameter.name)
    if int8:
        # Before the move to the device, which never holds the linears' weights in `options.dtype`.
        hold_int8(replica.stage)
    replica.stage.to(mesh.device)
    if seed is not None:
        initialise(replica, seed)  # on the device: a CPU draws 37 million values a second
    return replica


def initialise(replica: Replica, seed: int, *, adapter_only: bool = False) -> None:
    """Give every parameter its initial value; adapter_only: leave the model's own as they are. Collective over tp."""
    fill([each for each in replica.parameters if each.adapter or not adapter_only], replica, seed)
    set_magnitudes(replica.stage)


@torch.no_grad()
def fill(parameters: Iterable[Parameter], replica: Replica, seed: int) -> None:
    """Fill parameters: with `Parameter.fill`, or with normal values drawn for the region that this rank holds."""
    tensors, mesh = replica.tensors, replica.mesh
    for parameter in parameters:
        replica.unset.discard(parameter.name)
        if parameter.std is None:
            tensors[parameter.name].fill_(parameter.fill)
            continue
        for part, region, values in mesh.parts_of(parameter, tensors[parameter.name]):
            values.copy_(normal_slice(seed, part.name, region, parameter.std, device=values.device))
