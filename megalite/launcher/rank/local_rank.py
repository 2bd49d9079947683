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
    given: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name not in _FLAGS:
            kept.append(argument)
        else:
            given.append(value if equals else next(rest, ""))
    if given:
        _require_agreement(given, environ)
    return kept


def _require_agreement(given: Iterable[str], environ: Mapping[str, str] | None) -> None:
    info = rank_info(environ)
    for value in given:
        if not re.fullmatch(r"[0-9]+", value):
            raise LaunchError(f"--local_rank {value!r} is not a whole number, as a launcher would give it")
        if int(value) != (info.local_rank if info else 0):
            found = (
                f"the variables of {info.launcher} say {info.local_rank}" if info else "LOCAL_RANK is not set"
            )
            raise LaunchError(
                f"--local_rank is {value}, but {found}; leave --local_rank out: the variables are enough"
            )
