"""Durations in RUN.toml: "23h30m", "45m", or a number of seconds."""

import re

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_FORM = re.compile("".join(f"(?:([0-9]+){unit})?" for unit in _SECONDS))


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
