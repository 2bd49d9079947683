"""A resolved run as a table of dotted keys, to compare it with another one."""

from collections.abc import Iterator, Mapping
from typing import Any

from megalite.config.sections.schema import RunConfig


def flat_settings(config: RunConfig) -> dict[str, str]:
    """Return "optimizer.learning_rate" -> "0.003" for each setting of a run."""
    return dict(flat(config.model_dump(mode="json")))


def flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted key and text of each value of nested tables; those of an array of tables are key[1], key[2]."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and all(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value, start=1):
            yield from flat(inner, f"{key}[{number}]")
    else:
        yield key, str(value)
