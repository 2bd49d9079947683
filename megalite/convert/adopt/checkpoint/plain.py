"""The plain values of what a checkpoint's file was unpickled to: numbers, texts, lists and tables of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.convert.foreign.unpickle import Foreign, load_pickle
from megalite.errors import CheckpointError

_MOST_VALUES = 50_000
"""Values after shared ones are written out, which a small file can make billions of."""
_LONGEST = 1 << 14
_DEEPEST = 16
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class _Plain:
    def __init__(self, path: Path):
        self.path, self.left = path, _MOST_VALUES

    def of(self, value: Any, depth: int = 0) -> Any:
        self.left -= 1
        if self.left < 0 or depth > _DEEPEST or (isinstance(value, str | int) and _size(value) > _LONGEST):
            raise CheckpointError(
                f"{self.path} has arguments that are longer than any program's; fetch it again"
            )
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Mapping):
            return {str(key): self.of(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, list | tuple | set):
            return [self.of(inner, depth + 1) for inner in value]
        if isinstance(value, torch.dtype):
            return _DTYPES.get(value, str(value))
        if isinstance(value, Foreign) and value.arguments:  # an enum's value, or the parts of a path
            parts = [self.of(inner, depth + 1) for inner in value.arguments]
            return parts[0] if len(parts) == 1 else "/".join(map(str, parts))
        return f"<{value.type_name if isinstance(value, Foreign) else type(value).__name__}>"


def plain(value: Any, path: Path) -> Any:
    """Return a value with a list for each tuple, the value for each enum, and "<class>" for each other object.

    Raises CheckpointError for more than any program's arguments are.
    """
    return _Plain(path).of(value)


def plain_fields(content: Any, path: Path) -> dict[str, Any]:
    """Return the attributes of an object as plain values. Raises CheckpointError where it is none."""
    if not isinstance(content, Foreign) or not content.fields:
        raise CheckpointError(f"{path} holds no arguments of a run; name another checkpoint's folder")
    fields: dict[str, Any] = plain(content.fields, path)
    return fields


def load_table(path: Path) -> Mapping[str, Any]:
    """Return a file's table as it was unpickled. Raises CheckpointError."""
    content = load_pickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds no dict; name another checkpoint's folder")
    return content


def _size(value: str | int) -> int:
    return len(value) if isinstance(value, str) else value.bit_length()
