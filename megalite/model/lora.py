"""Gives the linears of a decoder layer their low-rank adapters."""

from torch import nn

from megalite.model.options import ModelOptions
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.lora import ColumnLora, RowLora
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.adapter import Lora
from megalite.topology.parameters import layer_parameters
from megalite.topology.shape import ModelShape


def add_lora(
    decoder_layer: nn.Module,
    shape: ModelShape,
    adapter: Lora,
    layer: int,
    mesh: ParallelMesh,
    options: ModelOptions,
) -> None:
    """Add A and B, and DoRA's magnitudes, to each linear of `decoder_layer` that the topology adapts."""
    rank, size = mesh.tp.rank, mesh.tp.size
    specs = {each.name: each.spec for each in layer_parameters(shape, layer)}
    for name, linear in decoder_layer.named_modules():
        canonical = f"model.layers.{layer}.{name}"
        if f"{canonical}.lora.A" not in specs:
            continue
        a, b = (specs[f"{canonical}.lora.{each}"].local_shape(rank, size) for each in ("A", "B"))
        if isinstance(linear, ColumnParallelLinear):
            parts = [
                (region.shape[0], adapter.adapts(part.name.removesuffix(".weight")))
                for part, region in specs[f"{canonical}.weight"].slices(rank, size)
            ]
            linear.lora = ColumnLora(
                a,
                b,
                parts,
                mesh=mesh,
                scale=adapter.scale,
                dora=adapter.dora,
                dtype=options.dtype,
            )
        elif isinstance(linear, RowParallelLinear):
            linear.lora = RowLora(
                a, b, mesh=mesh, scale=adapter.scale, dora=adapter.dora, dtype=options.dtype
            )


def set_magnitudes(stage: nn.Module) -> None:
    """Start the magnitudes of DoRA at the norms of the rows that it adapts. Collective over tp."""
    for linear in stage.modules():
        if isinstance(linear, ColumnParallelLinear | RowParallelLinear) and linear.lora is not None:
            linear.lora.set_magnitudes(linear.weight)
