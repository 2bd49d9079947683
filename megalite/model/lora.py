"""Gives the linears of a decoder layer their low-rank adapters."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from megalite.model.options import ModelOptions
from megalite.parallel.layers import ColumnParallelLinear, ExpertLinear, RowParallelLinear
from megalite.parallel.lora import ColumnLora, ExpertLora, LoraShare, RowLora
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.adapter import Lora
from megalite.topology.parameters import layer_parameters
from megalite.topology.shape import ModelShape

_A = ".lora.A"
_FORMS: Mapping[type, type[ColumnLora | RowLora | ExpertLora]] = {
    ColumnParallelLinear: ColumnLora,
    RowParallelLinear: RowLora,
    ExpertLinear: ExpertLora,
}


def lora_shares(shape: ModelShape, layer: int, mesh: ParallelMesh) -> dict[str, LoraShare]:
    """Return name within the decoder layer -> share, of each linear that the shape's adapter changes."""
    adapter = shape.adapter
    assert isinstance(adapter, Lora)
    parameters = {each.name: each for each in layer_parameters(shape, layer, mesh.experts(shape))}
    shares = {}
    for name, a in parameters.items():
        if not name.endswith(_A):
            continue
        linear = name.removesuffix(_A)
        parts = tuple(
            (region.shape[0], adapter.adapts(part.name.removesuffix(".weight")))
            for part, region in mesh.slices(parameters[f"{linear}.weight"])
        )
        within = linear.removeprefix(f"model.layers.{layer}.")
        shares[within] = LoraShare(a, parameters[f"{linear}.lora.B"], parts)
    return shares


def add_lora(
    decoder_layer: nn.Module,
    shape: ModelShape,
    adapter: Lora,
    layer: int,
    mesh: ParallelMesh,
    options: ModelOptions,
) -> None:
    """Add A and B, and DoRA's magnitudes, to each linear of `decoder_layer` that the topology adapts."""
    for name, share in lora_shares(shape, layer, mesh).items():
        linear: Any = decoder_layer.get_submodule(name)
        # The linear's own mesh: one that is whole on each rank takes part in no collective.
        own = getattr(linear, "mesh", mesh)
        linear.lora = _FORMS[type(linear)](adapter, share, own, options.dtype, options.weight_gradients)


def set_magnitudes(stage: nn.Module) -> None:
    """Start the magnitudes of DoRA at the norms of the rows that it adapts. Collective over tp."""
    for linear in stage.modules():
        if isinstance(linear, ColumnParallelLinear | RowParallelLinear) and linear.lora is not None:
            linear.lora.set_magnitudes(linear.weight)
