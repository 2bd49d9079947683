"""A system whose files are mappings (YAML, JSON): the account of them, DeepSpeed's JSON beside them, and a hostfile."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.convert.adopt.account import Account
from megalite.convert.adopt.deepspeed_json import NAMES, answer_json
from megalite.convert.adopt.keyed.keyed_file import MAPPINGS, answer_all, complete, read_files, score
from megalite.convert.adopt.launchers import answer_launcher, is_hostfile
from megalite.convert.adopt.rules import KeyRule, Reading
from megalite.convert.adopt.sources import Source, read_source
from megalite.errors import ConfigError, Problem

_KEY = "deepspeed"


@dataclass(frozen=True)
class KeyedSystem:
    """A program with keys of its own.

    rules: key, with dots within the tables of `blocks` -> its rule. structures: the keys that may be lists or tables.
    fill: sets the program's defaults. hyphens: whether "a-b" is "a_b".
    """

    name: str
    rules: Mapping[str, KeyRule]
    structures: Collection[str]
    fill: Callable[[Reading], None]
    blocks: Collection[str] = ()
    hyphens: bool = False

    def known_keys(self, source: Source) -> int:
        """Return how many keys of a file it knows. Raises ConfigError for a file that is no mapping."""
        return score(source, self.rules, hyphens=self.hyphens)

    def read(self, sources: Sequence[Source]) -> Account:
        """Return the account of its files. Raises ConfigError for one that cannot be read."""
        files = _named_files(sources, self.rules)
        if not files.own:
            message = "does not start a training by itself"
            remedy = "name the script or configuration that uses it too, or set deepspeed.config in RUN.toml"
            raise ConfigError([Problem(str(sources[0].path), message, remedy)], "megalite adopt")
        reading, unset = read_files(self.name, files.own, self.blocks)
        deepspeed = _find_deepspeed(reading, files)
        reading = answer_all(reading, unset, self.rules, self.structures)
        if deepspeed is not None:
            answer_json(reading.account, *deepspeed)
        answer_launcher(reading.account, [], files.hostfiles)
        complete(reading, self.fill)
        return reading.account


@dataclass(frozen=True)
class _NamedFiles:
    """The files that were named, by their kind. own: those of the system itself."""

    own: Sequence[Source]
    deepspeed: Sequence[Source]
    hostfiles: Sequence[Source]


def _named_files(sources: Sequence[Source], rules: Mapping[str, KeyRule]) -> _NamedFiles:
    """Return the files by their kind. rules: of the system. Raises ConfigError for a file of no kind."""
    own: list[Source] = []
    deepspeed: list[Source] = []
    hostfiles: list[Source] = []
    for source in sources:
        if source.suffix in MAPPINGS:
            is_deepspeeds = source.suffix == ".json" and score(source, NAMES) > score(source, rules)
            (deepspeed if is_deepspeeds else own).append(source)
        elif is_hostfile(source):
            hostfiles.append(source)
        else:
            problem = Problem(str(source.path), "is no YAML, JSON or hostfile", "leave it out")
            raise ConfigError([problem], "megalite adopt")
    return _NamedFiles(own, deepspeed, hostfiles)


def _find_deepspeed(reading: Reading, files: _NamedFiles) -> tuple[Mapping[str, Any], str] | None:
    """Return DeepSpeed's keys and the name of their file, and answer the key that names it; None without one."""
    value = reading.get(_KEY)
    if isinstance(value, Mapping) and value:
        reading.take(_KEY, {}, "its keys are answered one by one")
        return value, _KEY
    place = next(iter(files.deepspeed), None)
    if place is None and isinstance(value, str) and value:
        path = next((path for path in (Path(value), reading.folder / value) if path.is_file()), None)
        if path is None:
            reading.refuse(_KEY, "DeepSpeed's JSON is not here", "name it as another PATH")
            return None
        place = read_source(path)
    if place is None:
        reading.no_effect(_KEY, "DeepSpeed is not used")
        return None
    reading.take(_KEY, {}, "its keys are answered one by one")
    return place.mapping(), place.path.name
