"""The programs whose files `megalite adopt` reads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megalite.convert.adopt.account import Account
from megalite.convert.adopt.keyed.keyed_systems import AXOLOTL, LLAMA_FACTORY, NEOX, TRAINER
from megalite.convert.adopt.megatron import system as megatron
from megalite.convert.adopt.sources import read_source
from megalite.errors import ConfigError, Problem, listed

SYSTEMS = (megatron.SYSTEM, NEOX, TRAINER, LLAMA_FACTORY, AXOLOTL)
"""In the order in which they are asked; the first that knows one of the files reads them all."""


def adopt(paths: Sequence[Path], values: Mapping[str, str] | None = None) -> Account:
    """Return the account of the files, read as the first system's that one of them matches. Raises ConfigError.

    values: variables of a launch script, and its own arguments as "1", "2", that are set from outside.
    """
    folders = [path for path in paths if path.is_dir()]
    if folders:
        if len(paths) > 1:
            message = "is a folder, which is adopted alone"
            raise ConfigError([Problem(str(folders[0]), message, "leave the others out")], "megalite adopt")
        from megalite.convert.adopt.checkpoint.folder import adopt_folder

        return adopt_folder(folders[0])
    sources = [replace(read_source(path), values=values or {}) for path in paths]
    for system in SYSTEMS:
        if any(system.matches(source) for source in sources):
            return system.read(sources)
    known = listed([system.name for system in SYSTEMS], most=10)
    problem = Problem(listed([str(path) for path in paths]), "is of no known program", f"known are {known}")
    raise ConfigError([problem], "megalite adopt")
