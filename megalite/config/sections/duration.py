"""Durations in RUN.toml: "23h30m", "45m" or a number of seconds; "1 epoch" or a number of steps."""

import re
from fractions import Fraction

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_FORM = re.compile("".join(f"(?:([0-9]+){unit})?" for unit in _SECONDS))
_EPOCHS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9}|/[0-9]{1,9})?) epochs?", re.ASCII)


def seconds_of(duration: float | str) -> float:
    """Return the seconds of a duration. Raises ValueError unless it is positive and like "1d12h", "90m" or "3600"."""
    if isinstance(duration, str) and duration.isascii() and duration.isdecimal():
        seconds = float(duration)  # a number on the command line
    elif isinstance(duration, str):
        match = _FORM.fullmatch(duration)
        if match is None:
            raise ValueError("is not a duration")
        numbers = [int(number or 0) for number in match.groups()]
        seconds = float(sum(map(int.__mul__, numbers, _SECONDS.values())))
    else:
        seconds = duration
    if seconds <= 0:
        raise ValueError("is not above 0")
    return seconds


def epochs_of(interval: str) -> Fraction:
    """Return the epochs of "1 epoch", "0.5 epochs" or "1/3 epochs". Raises ValueError for another text, and for 0."""
    match = _EPOCHS.fullmatch(interval)
    if match is None:
        raise ValueError("is no number of epochs")
    try:
        epochs = Fraction(match[1])
    except ZeroDivisionError:
        raise ValueError("divides by 0") from None
    if epochs <= 0:
        raise ValueError("is not above 0")
    return epochs
