"""Canonical tensors from a source that has each tensor of a Hugging Face model whole, under the model's names."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalite.checkpoint.regions import full_slice, index_in
from megalite.checkpoint.weights import WeightReader
from megalite.convert.finite import require_finite
from megalite.families.registry import family_tensors
from megalite.families.tensors import FamilyTensor
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice


class WholeTensorReader(WeightReader):
    """Reads one tensor of the source at a time; a fused one once for each of its parts."""

    block_elements = 1 << 62

    def __init__(self, shape: ModelShape, load: Callable[[str, FamilyTensor], Tensor], source: object):
        """load: (state key, tensor) -> the tensor or its moment, of the tensor's shape. source: names it in errors."""
        self._load, self._source = load, source
        self._shapes = canonical_tensors(shape)
        self._tensors = {part: tensor for tensor in family_tensors(shape) for part in tensor.parts}

    def close(self) -> None:
        """No file is open between two reads."""

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a canonical tensor; raises CheckpointError for a damaged file or a value that is NaN."""
        tensor = self._tensors[name]
        values = self._load(state_key, tensor)
        require_finite(values, f"{state_key} of {tensor.name}", self._source)
        return region_of_part(tensor, values, name, region, self._shapes)


def region_of_part(
    tensor: FamilyTensor,
    values: Tensor,
    name: str,
    region: TensorSlice,
    shapes: Mapping[str, tuple[int, ...]],
) -> Tensor:
    """Return a region of the canonical tensor `name` from the values of the whole tensor that it stands in.

    shapes: of canonical tensors.
    """
    values = values.t() if tensor.transposed else values
    stored = tensor.slices(name, region, shapes)
    pieces = [values[index_in(piece, full_slice(tuple(values.shape)))] for piece in stored]
    joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    own: Tensor = tensor.part_from(name, joined)
    return own
