"""JSON that somebody else may have written: parsed only where it can mean one thing. No torch."""

import gc
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


def parse(text: str) -> Any:
    """The value of `text`; raises ValueError where it is no JSON, or has a key twice or a number beyond bounds."""
    try:
        return json.loads(text, object_pairs_hook=_once_each, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextmanager
def without_collections() -> Iterator[None]:
    """Nothing of what is parsed is garbage, and to look through all of it again and again takes most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def is_int(value: object) -> bool:
    """Whether this is a number of things: no bool, not negative, and small enough to compute with."""
    return type(value) is int and 0 <= value < 1 << 62


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it has {key[:100]!r} twice")
    return found


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is no number")
    return value
