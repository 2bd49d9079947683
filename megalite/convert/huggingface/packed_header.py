"""How compressed-tensors stores an int8 weight: four columns in one int32, with a scale for each row, and the shape.

Which tensors of a family have that form, too. No torch.

`name.weight` [out, in] is `name.weight_packed` int32 [out, in / 4], `name.weight_scale` [out, 1] and
`name.weight_shape` int64 [2]. A packed byte is the value + 128, the first column in the lowest byte.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megalite.checkpoint.tensor_header import HeaderEntry
from megalite.errors import CheckpointError
from megalite.families.registry import family_tensors
from megalite.families.tensors import FamilyTensor, InterleavedExperts
from megalite.topology.experts import ROUTER
from megalite.topology.parameters import model_parameters
from megalite.topology.shape import ModelShape

PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
PER_WORD = 4
INT8 = "I8"
"""The type of a packed weight's values, in safetensors' words."""


def weights_of(header: Mapping[str, HeaderEntry]) -> Iterator[tuple[str, HeaderEntry]]:
    """Yield a file's tensors; a packed weight under its own name, as INT8 [out, in], without its shape's tensor."""
    for name, entry in header.items():
        weight = name.removesuffix(PACKED)
        if weight != name and entry.dtype == "I32" and len(entry.shape) == 2:
            rows, words = entry.shape
            yield weight, HeaderEntry(INT8, (rows, PER_WORD * words), entry.start, entry.stop)
        elif not (name.endswith(SHAPE) and f"{name.removesuffix(SHAPE)}{PACKED}" in header):
            yield name, entry


def is_packed(tensor: FamilyTensor) -> bool:
    """Whether a tensor of a family is quantised: a matrix of a decoder layer, stored as [out, in], but no router."""
    inner = tensor.parts[0].startswith("model.layers.") and len(tensor.shape) == 2
    apart = tensor.transposed or isinstance(tensor, InterleavedExperts)
    return inner and not apart and not tensor.parts[0].endswith(f".{ROUTER}.weight")


def require_packed(shape: ModelShape) -> None:
    """Raise CheckpointError unless each matrix that the model holds in int8 has a tensor of its own to pack.

    Those are the matrices that ranks cut. Others are held as they are, and a file would have them packed too.
    """
    tensors = {part: tensor for tensor in family_tensors(shape) for part in tensor.parts}
    for parameter in model_parameters(shape):
        name = parameter.spec.parts[0].name
        if parameter.is_hidden_matrix and is_packed(tensors[name]) != (parameter.spec.dim is not None):
            raise CheckpointError(f"{name} has no int8 form here; take the model in bf16 or float32")


def scale_of(tensor: FamilyTensor) -> FamilyTensor:
    """Return the tensor of the scales [rows, 1] of a quantised one."""
    return replace(tensor, name=f"{tensor.name}{SCALE}", shape=(tensor.shape[0], 1))
