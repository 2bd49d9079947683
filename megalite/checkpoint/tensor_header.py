"""Read headers of safetensors files strictly: a file is refused unless its tensors fill it exactly. No torch.

A file has eight bytes with the header's length, the header (JSON: name -> dtype, shape, data_offsets), and the data.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from megalite.checkpoint.strict_json import is_int, parse

# The same limit as in the safetensors library.
_LONGEST_BYTES = 100_000_000
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file. dtype: "F32", "BF16", ...; start, stop: its byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """Return name -> entry, in the header's order. Raises OSError; ValueError unless the tensors fill the file."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(size_bytes - 8, _LONGEST_BYTES):
            if first.startswith((b"\x80", b"PK\x03\x04")):
                raise ValueError("it is a pickle, which may run any code and is never opened")
            raise ValueError(f"it has {size_bytes} bytes, but claims a header of {length}")
        content = parse(file.read(length).decode())
    if not isinstance(content, dict):
        raise ValueError("its header is not a table of tensors")
    entries = {name: _entry(name, each, 8 + length) for name, each in content.items() if name != _METADATA}
    for problem in _misplaced(entries, 8 + length, size_bytes):
        raise ValueError(problem)
    return entries


def _entry(name: str, content: Any, data_start: int) -> HeaderEntry:
    fields = ("dtype", "shape", "data_offsets")
    dtype, shape, offsets = (content.get(key) if isinstance(content, dict) else None for key in fields)
    if not (_are_ints(shape) and _are_ints(offsets) and len(offsets) == 2 and isinstance(dtype, str)):
        raise ValueError(f"dtype, shape or data_offsets of {name} are malformed in its header")
    if dtype not in _BITS:
        raise ValueError(f"{name} has the unknown dtype {dtype}")
    start, stop = offsets
    if 8 * (stop - start) != prod(shape) * _BITS[dtype]:
        raise ValueError(f"{name} has {stop - start} bytes, which do not fit {shape} of {dtype}")
    return HeaderEntry(dtype, tuple(shape), data_start + start, data_start + stop)


def _misplaced(entries: Mapping[str, HeaderEntry], data_start: int, size_bytes: int) -> Iterator[str]:
    """Yield what is wrong with tensors that overlap, leave a gap or exceed the file."""
    reached = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != reached:
            yield f"{name} begins at byte {entry.start}, but the data before it ends at {reached}"
        reached = entry.stop
        if reached > size_bytes:
            yield f"{name} should end at byte {reached}, but the file ends at {size_bytes}: it was cut short"
    if reached != size_bytes:
        yield f"its tensors end at byte {reached}, but the file at {size_bytes}"


def _are_ints(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(is_int(value) for value in values)
