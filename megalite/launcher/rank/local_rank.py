"""The flag --local_rank, which deepspeed and older launchers add to the arguments of each rank."""

import re
from collections.abc import Iterable, Mapping

from megalite.errors import LaunchError
from megalite.launcher.rank.detect import rank_info

_FLAGS = ("--local_rank", "--local-rank")


def without_local_rank(arguments: Iterable[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Drop --local_rank=N and --local-rank=N, also with a space for "=".

    Raises LaunchError where N is not the local rank that the launcher's variables give.
    """
    kept: list[str] = []
    numbers: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name not in _FLAGS:
            kept.append(argument)
        else:
            numbers.append(value if equals else next(rest, ""))
    if numbers:
        _require_agreement(numbers, environ)
    return kept


def _require_agreement(numbers: Iterable[str], environ: Mapping[str, str] | None) -> None:
    info = rank_info(environ)
    for value in numbers:
        if not re.fullmatch(r"[0-9]+", value):
            raise LaunchError(f"--local_rank {value!r} is not a whole number, as a launcher would give it")
        if int(value) != (info.local_rank if info else 0):
            otherwise = (
                f"the variables of {info.launcher} say {info.local_rank}" if info else "LOCAL_RANK is not set"
            )
            raise LaunchError(
                f"--local_rank is {value}, but {otherwise}; leave --local_rank out: the variables are enough"
            )
