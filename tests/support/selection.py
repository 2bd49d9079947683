"""Selection of the cases of a parametrized test that the core runs; the others are marked `extended`."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

PARAMETER_SET = type(pytest.param())


def cases(values: Iterable[Any], *, core: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Return the arguments for `pytest.mark.parametrize`: all values; the core runs those in `core`.

    A tuple holds one value for each argument. core: values, or a function value -> whether it belongs to the core.
    A case that is already marked (slow, gpu) stays as it is. Raises ValueError if the core has no case.
    """
    chosen = core if callable(core) else core.__contains__
    made, count = [], 0
    for value in values:
        if isinstance(value, PARAMETER_SET) and value.marks:
            made.append(value)
            continue
        bare = value.values if isinstance(value, PARAMETER_SET) else value
        row = bare if type(bare) is tuple else (bare,)
        of_core = chosen(row[0] if len(row) == 1 else row)
        count += of_core
        name = value.id if isinstance(value, PARAMETER_SET) else None
        made.append(pytest.param(*row, marks=() if of_core else pytest.mark.extended, id=name))
    if not count:
        raise ValueError("no case is of the core")
    return made
