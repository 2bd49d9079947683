"""The formats of other programs' checkpoints that are read, each with its finder and its loader. No torch."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megalite.convert.deepspeed.folder import find_engine
from megalite.convert.deepspeed.pipeline_folder import pipeline_place
from megalite.convert.megatron.folder import megatron_place
from megalite.convert.torch_dcp.folder import find_dcp
from megalite.convert.trainer.folder import find_trainer
from megalite.convert.universal.folder import find_universal
from megalite.errors import CheckpointError

if TYPE_CHECKING:
    from megalite.convert.foreign.checkpoint import Loader


@dataclass(frozen=True)
class ForeignFormat:
    """A format of checkpoints.

    name: as users know it, with its article. find: the place in a folder that its loader opens, None for a folder of
    another kind; reads no more than names and small files; raises CheckpointError for a folder of this kind that cannot
    be read at all. module: of its loader, which loads torch. takes: the names of the ImportOptions that mean something
    here.
    """

    name: str
    find: Callable[[Path], Path | None]
    module: str
    takes: frozenset[str] = frozenset()

    def loader(self) -> "Loader":
        return cast("Loader", import_module(self.module))


FORMATS = (
    ForeignFormat(
        "a checkpoint of DeepSpeed's pipeline engine (GPT-NeoX, Megatron-DeepSpeed)",
        pipeline_place,
        "megalite.convert.deepspeed.pipeline_load",
        takes=frozenset({"hf_config", "vocab_size"}),
    ),
    ForeignFormat(
        "a DeepSpeed universal checkpoint",
        find_universal,
        "megalite.convert.universal.load",
        takes=frozenset({"hf_config"}),
    ),
    ForeignFormat(
        "a checkpoint of DeepSpeed's engine",
        find_engine,
        "megalite.convert.deepspeed.load",
        takes=frozenset({"hf_config"}),
    ),
    ForeignFormat(
        "a Megatron-LM checkpoint",
        megatron_place,
        "megalite.convert.megatron.load",
        takes=frozenset({"vocab_size"}),
    ),
    ForeignFormat(
        "a torch distributed checkpoint",
        find_dcp,
        "megalite.convert.torch_dcp.load",
        takes=frozenset({"hf_config"}),
    ),
    ForeignFormat("a Hugging Face Trainer checkpoint", find_trainer, "megalite.convert.trainer.load"),
)
"""In the order in which they are asked; the first that finds its place has the folder."""


def find_format(folder: Path) -> tuple[ForeignFormat, Path] | None:
    """Return the format of a folder's checkpoint and the place that its loader opens; None for any other folder.

    Raises CheckpointError for a checkpoint that no loader can open, with what to do.
    """
    for known in FORMATS:
        if (place := known.find(folder)) is not None:
            return known, place
    return None


def require_not_foreign(folder: Path, doing: str, command: str) -> None:
    """Raise CheckpointError if a folder is another program's checkpoint.

    doing: the setting or argument that names it. command: the rest of the command to type, with {} for the folder.
    """
    if (found := find_format(folder)) is not None:
        raise CheckpointError(
            f"{doing}: {folder} is {found[0].name}; first write it in another folder: megalite convert"
            f" {command.format(shlex.quote(str(folder)))}"
        )
