"""The results of an evaluation as a table and as JSON. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json

from megalite.data.files.partial_files import partial
from megalite.errors import DataError


def table(figures: Mapping[str, Any]) -> str:
    """Return one line for each figure: its name and its value."""
    width = max(map(len, figures))
    return "\n".join(
        f"  {name.replace('_', ' '):<{width}}  {_shown(value)}" for name, value in figures.items()
    )


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write the results, replacing a file that is there. Raises DataError."""
    # JSON has no infinity.
    content = to_json(results, indent=2, inf_nan_mode="null", fallback=_plain)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial(path).write_bytes(content + b"\n")
        partial(path).replace(path)
    except OSError as error:
        raise DataError(
            f"--output: {path} cannot be written ({error.strerror or error}); name a file in a folder of yours"
        ) from error


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.4e}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _plain(value: Any) -> Any:
    """Return a numpy scalar as a number, another object as its text."""
    return value.item() if isinstance(value, np.generic) else str(value)
