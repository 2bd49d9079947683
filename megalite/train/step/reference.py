"""The reference model of preference tuning: the model without its adapter, or as it was at its start.

It needs no second copy of the weights: without its adapter the model computes the reference in every step; otherwise
the losses are computed before the first step (train/checkpoints/reference_table.py).
"""

from megalite.topology.adapter import Lora
from megalite.topology.shape import ModelShape


def is_without_adapter(shape: ModelShape) -> bool:
    """Return whether the model before its tuning is the trained one without its new adapter: if all else is frozen."""
    adapter = shape.adapter
    if isinstance(adapter, Lora):
        return not adapter.modules_to_save and adapter.bias == "none"
    return adapter is not None
