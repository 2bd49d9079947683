"""JSON that somebody else may have written: parsed only where it can mean one thing. No torch."""

import gc
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


def parse(text: str) -> Any:
    """The value of `text`; raises ValueError where it is no JSON, or has a key twice or a number beyond bounds."""
    try:
        with _without_collections():
            return json.loads(text, object_pairs_hook=_once_each, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def is_int(value: object) -> bool:
    """Whether this is a number of things: no bool, not negative, and small enough to compute with."""
    return type(value) is int and 0 <= value < 1 << 62


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is no number")
    return value


@contextmanager
def _without_collections() -> Iterator[None]:
    """Nothing that is parsed is garbage, and looking through all of it again and again takes most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
