"""The kinds of value that DeepSpeed's keys take."""

from collections.abc import Callable
from typing import Any

from megalite.config.sections.toml import shown


def problem_of(kind: str, value: Any) -> tuple[str, str] | None:
    """Return the message and the remedy for a value that is not of its kind; None for one that is."""
    if kind in _TESTS:
        test, words = _TESTS[kind]
        if test(value):
            return None
    else:
        words = f"one of {kind.replace(' or ', ', ')}"
        if isinstance(value, str) and value.lower() in kind.split(" or "):
            return None
    return f"{shown(value)} should be {words}", _unquoted(value) if kind in _TESTS else ""


def _unquoted(value: Any) -> str:
    """Return a remedy for a number that is written as text, as "5e8"."""
    try:
        float(value)
    except (TypeError, ValueError):
        return ""
    return f"write {value} without quotation marks" if isinstance(value, str) else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_whole(value: Any, least: int) -> bool:
    return _is_number(value) and (isinstance(value, int) or value.is_integer()) and value >= least


_TESTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "count": (lambda value: _is_whole(value, 0), "a whole number, 0 or more"),
    "positive": (lambda value: _is_whole(value, 1), "a whole number, 1 or more"),
    "number": (_is_number, "a number, 0 or more"),
    "fraction": (lambda value: _is_number(value) and value <= 1, "a number from 0 to 1"),
    "text": (lambda value: isinstance(value, str) and value != "", "text"),
}
