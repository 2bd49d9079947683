"""Reads API keys, and decides whether an address needs one. No torch."""

from collections.abc import Iterator
from pathlib import Path

from megalite.errors import ConfigError, Problem
from megalite.serve.settings import LOOPBACK

_SHORTEST = 16


def read_keys(file: Path | None, variable: str, host: str) -> tuple[str, ...]:
    """Return the API keys of a file, a line each, and of MEGALITE_API_KEY.

    Empty lines and those that begin with # do not count. Raises ConfigError if the file cannot be read, if a key is
    short or not ASCII, and if there is none though `host` is not this machine alone.
    """
    problems: list[Problem] = []
    keys: dict[str, str] = {}
    if file is not None:
        numbered = _lines(file, problems)
        keys = {key: f"--api-key-file {file}, line {number}" for number, key in numbered}
        if not numbered and not problems:
            problems.append(Problem(f"--api-key-file {file}", "has no key", "write one, a line each"))
    if variable:
        keys[variable] = "MEGALITE_API_KEY"
    problems += _short(keys)
    if not keys and not problems and host not in LOOPBACK:
        problems.append(
            Problem(
                f"--host {host}",
                "can be reached from other machines, and no API key protects it",
                "name a file of keys with --api-key-file, or set MEGALITE_API_KEY",
            )
        )
    if problems:
        raise ConfigError(problems, "the server")
    return tuple(keys)


def _lines(file: Path, problems: list[Problem]) -> list[tuple[int, str]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(Problem(f"--api-key-file {file}", f"cannot be read ({error})", "name a text file"))
        return []
    stripped = [(number, line.strip()) for number, line in enumerate(lines, start=1)]
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]


def _short(keys: dict[str, str]) -> Iterator[Problem]:
    for key, origin in keys.items():
        if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
            yield Problem(
                origin,
                f"is no key of at least {_SHORTEST} printable ASCII characters without spaces",
                "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
