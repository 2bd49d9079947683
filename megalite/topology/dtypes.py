"""The number types of tensors: torch's name, safetensors' code, the setting's word and the size of each. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NumberType:
    """name: as torch has it. code: in the header of a safetensors file. precision: as a setting; "" for integers."""

    name: str
    code: str
    size_bytes: int
    precision: str = ""


# In the order of the safetensors library: largest alignment first.
NUMBER_TYPES = (
    NumberType("int64", "I64", 8),
    NumberType("float64", "F64", 8, "fp64"),
    NumberType("float32", "F32", 4, "fp32"),
    NumberType("int32", "I32", 4),
    NumberType("bfloat16", "BF16", 2, "bf16"),
    NumberType("float16", "F16", 2, "fp16"),
)
FLOATS = {kind.name: kind for kind in NUMBER_TYPES if kind.precision}
"""The types that weights and optimizer state can have, by torch's name."""
PRECISIONS = {kind.precision: kind for kind in FLOATS.values()}
