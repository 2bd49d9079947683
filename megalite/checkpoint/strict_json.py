"""Parse untrusted JSON strictly: no duplicate keys, no NaN or infinity, bounded nesting. No torch."""

import gc
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


def parse(text: str, as_table: Callable[[dict[str, Any]], Any] = lambda table: table) -> Any:
    """Parse `text`. Raises ValueError if it is not JSON, repeats a key, or has a number that is not finite.

    as_table: returns what stands for a table, whose own tables have been replaced before.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=lambda pairs: as_table(_once_each(pairs)),
            parse_constant=_refuse,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextmanager
def without_collections() -> Iterator[None]:
    """Turn off garbage collection: during a large parse it frees nothing and takes most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def is_int(value: object) -> bool:
    """Whether `value` is an int of 0 to 2**62 - 1; a bool is not."""
    return type(value) is int and 0 <= value < 1 << 62


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it has {key[:100]!r} twice")
    return table


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is no number")
    return value
