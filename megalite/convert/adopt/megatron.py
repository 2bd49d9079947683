"""Launch scripts of Megatron-LM and Megatron-DeepSpeed."""

from collections.abc import Sequence

from megalite.convert.adopt.account import Account
from megalite.convert.adopt.sources import Source, System


def _matches(source: Source) -> bool:
    return False


def _read(sources: Sequence[Source]) -> Account:
    return Account("Megatron-LM")


SYSTEM = System("Megatron-LM", _matches, _read)
