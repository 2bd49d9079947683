"""A folder of another program, imported as `megalite convert import` does."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.convert.foreign.checkpoint import ImportOptions, import_foreign
from megalite.convert.foreign.formats import find_format
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class Imported:
    """The new checkpoint; format: the name of the folder's format; the rest as ForeignCheckpoint says."""

    checkpoint: Path
    format: str
    shape: ModelShape
    dtype: torch.dtype
    step: int | None
    notes: Sequence[str]


def import_folder(folder: Path, run_folder: Path, **options: Any) -> Imported:
    found = find_format(folder)
    assert found is not None, f"no format has {folder}"
    opened = found[0].loader().open_checkpoint(found[1], ImportOptions(**options))
    checkpoint, run = import_foreign(opened, run_folder), opened.run
    return Imported(checkpoint, found[0].name, run.shape, run.dtype, opened.step, opened.notes)
