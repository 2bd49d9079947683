"""All entries of this package, and entries from a file."""

import importlib.util
from pathlib import Path

from megalite.selftest import activations, attention, expert_rows, loss, norms, optimizer, rotary
from megalite.selftest.registry import Entry

ENTRIES: tuple[Entry, ...] = (
    *norms.ENTRIES,
    *rotary.ENTRIES,
    *activations.ENTRIES,
    *attention.ENTRIES,
    *expert_rows.ENTRIES,
    *loss.ENTRIES,
    *optimizer.ENTRIES,
)


def entries_of(file: Path | None) -> tuple[Entry, ...]:
    """Return the `ENTRIES` of a Python file; without a file those of this package."""
    if file is None:
        return ENTRIES
    spec = importlib.util.spec_from_file_location("entries_of_a_file", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return tuple(module.ENTRIES)
