"""The programs whose files `megalite adopt` reads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megalite.convert.adopt.account import Account
from megalite.convert.adopt.deepspeed_json import NAMES
from megalite.convert.adopt.keyed import axolotl, llama_factory, trainer
from megalite.convert.adopt.keyed.keyed_file import MAPPINGS, score
from megalite.convert.adopt.keyed.keyed_system import KeyedSystem
from megalite.convert.adopt.megatron import system as megatron
from megalite.convert.adopt.neox import system as neox
from megalite.convert.adopt.sources import Source, read_source
from megalite.errors import ConfigError, Problem, listed

KEYED = (neox.SYSTEM, trainer.SYSTEM, llama_factory.SYSTEM, axolotl.SYSTEM)
"""The programs whose files are YAML or JSON, in the order in which one of several files decides."""
PROGRAMS = (megatron.NAME, *(system.name for system in KEYED))


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
    if any(map(megatron.matches, sources)):
        return megatron.read(sources)
    recognised = [_recognised(source) for source in sources]
    for system in KEYED:
        if system in recognised:
            return system.read(sources)
    known = listed(PROGRAMS, most=10)
    problem = Problem(listed([str(path) for path in paths]), "is of no known program", f"known are {known}")
    raise ConfigError([problem], "megalite adopt")


def _recognised(source: Source) -> KeyedSystem | None:
    """Return the system that knows most of a file's keys, the earlier one of two; None if none knows any.

    Raises ConfigError for a YAML or JSON file that is no mapping.
    """
    if source.suffix not in MAPPINGS:
        return None
    scores = [system.known_keys(source) for system in KEYED]
    if source.suffix == ".json" and scores[0] == score(source, NAMES):
        scores[0] = 0  # DeepSpeed's own JSON, beside another file
    return KEYED[scores.index(max(scores))] if any(scores) else None
