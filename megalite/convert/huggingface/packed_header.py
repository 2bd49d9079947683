"""How compressed-tensors stores an int8 weight: four columns in one int32, with a scale for each row, and the shape.

`name.weight` [out, in] is `name.weight_packed` int32 [out, in / 4], `name.weight_scale` [out, 1] and
`name.weight_shape` int64 [2]. A packed byte is the value + 128, the first column in the lowest byte.
"""

from collections.abc import Iterator, Mapping

from megalite.checkpoint.tensor_header import HeaderEntry

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
