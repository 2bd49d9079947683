"""What a launcher puts among the arguments of the program it starts."""

import re
from collections.abc import Iterable

_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")


def without_local_rank(arguments: Iterable[str]) -> list[str]:
    """Those of the user: deepspeed, without --no_local_rank, adds what the environment says anyway."""
    return [argument for argument in arguments if not _LOCAL_RANK.fullmatch(argument)]
