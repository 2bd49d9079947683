"""Files beside a configuration in YAML or JSON: DeepSpeed's JSON, which it names or the user does, and a hostfile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.convert.adopt.deepspeed_json import NAMES, answer_json
from megalite.convert.adopt.keyed.keyed_file import MAPPINGS, score
from megalite.convert.adopt.keyed.yaml_file import read_mapping
from megalite.convert.adopt.launchers import answer_launcher, is_hostfile
from megalite.convert.adopt.rules import KeyRule, Reading
from megalite.convert.adopt.sources import Source, read_source
from megalite.errors import ConfigError, Problem

_KEY = "deepspeed"


@dataclass(frozen=True)
class NamedFiles:
    """The files that were named, by their kind. own: those of the system itself."""

    own: Sequence[Source]
    deepspeed: Sequence[Source]
    hostfiles: Sequence[Source]


def named_files(sources: Sequence[Source], rules: Mapping[str, KeyRule]) -> NamedFiles:
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
    return NamedFiles(own, deepspeed, hostfiles)


def find_deepspeed(reading: Reading, files: NamedFiles) -> tuple[Mapping[str, Any], str] | None:
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
    return read_mapping(place), place.path.name


def answer_companions(
    reading: Reading, files: NamedFiles, found: tuple[Mapping[str, Any], str] | None
) -> None:
    """Answer the keys of DeepSpeed's JSON and the hostfile, after those of the system."""
    if found is not None:
        answer_json(reading.account, *found)
    answer_launcher(reading.account, [], files.hostfiles)
