"""The results of an evaluation as a table and as JSON. No torch."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
    text = json.dumps(_plain(results), indent=2, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial(path).write_text(text, encoding="utf-8")
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
    """Return the value for JSON, which has no infinity; a numpy scalar becomes a number, another object its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, str | int) else str(value)
