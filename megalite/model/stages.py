"""Builds one pipeline stage and gives every parameter its initial value by name."""

from collections.abc import Sequence

import torch

from megalite.model.options import PLAIN, ModelOptions
from megalite.model.transformer import Stage
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.random import normal_box
from megalite.topology.parameters import Parameter, stage_parameters
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit


def build_stage(
    shape: ModelShape,
    mesh: ParallelMesh,
    split: PipelineSplit,
    options: ModelOptions = PLAIN,
    *,
    seed: int | None,
) -> Stage:
    """This rank's stage, on the mesh's device.

    seed: initial weights are a function of it and of the parameter's name, equal in every layout; None leaves
    them unset, to be loaded.
    """
    built = Stage(shape, split, mesh, options)
    if seed is not None:
        initialise(built, list(stage_parameters(shape, split, mesh.at.pp)), mesh, seed)
    return built.to(mesh.device)


@torch.no_grad()
def initialise(stage: Stage, parameters: Sequence[Parameter], mesh: ParallelMesh, seed: int) -> None:
    """Fill every parameter: norms with ones, weights with normal values drawn for the region this rank holds."""
    tensors = dict(stage.named_parameters())
    if set(tensors) != {parameter.name for parameter in parameters}:
        raise AssertionError(f"stage and topology disagree: {set(tensors) ^ {p.name for p in parameters}}")
    for parameter in parameters:
        if parameter.std is None:
            tensors[parameter.name].fill_(parameter.fill)
            continue
        row = 0
        for part, box in parameter.spec.boxes(mesh.tp.rank, mesh.tp.size):
            rows = tensors[parameter.name][row : row + box.shape[0]]
            rows.copy_(normal_box(seed, part.name, box, parameter.std))
            row += box.shape[0]
