"""A file that is adopted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.config.sections.mapping_file import read_mapping
from megalite.errors import ConfigError, Problem

LARGEST_FILE = 1 << 20
"""Bytes of a file that is read: larger ones are no launch scripts or configurations."""


@dataclass(frozen=True)
class Source:
    """A file that was named. text: its content. values: variables of a script that the user sets."""

    path: Path
    text: str
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def suffix(self) -> str:
        return self.path.suffix.lower()

    def mapping(self) -> dict[str, Any]:
        """Return the keys of a YAML or JSON file. Raises ConfigError."""
        return read_mapping(self.path, self.text, "megalite adopt")


def read_source(path: Path) -> Source:
    """Return a file as text. Raises ConfigError for one that is missing, too large, or no text."""
    try:
        if path.is_dir():
            raise ConfigError([Problem(str(path), "is a folder", "name the files in it")], str(path))
        if not path.is_file():
            raise ConfigError([Problem(str(path), "no such file", "check the path")], str(path))
        if path.stat().st_size > LARGEST_FILE:
            message = f"has more than {LARGEST_FILE:,} bytes"
            raise ConfigError([Problem(str(path), message, "name a script or configuration")], str(path))
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}")], str(path)) from None
    except UnicodeDecodeError as error:
        message = f"byte {error.start} is not UTF-8"
        raise ConfigError([Problem(str(path), message, "name a text file")], str(path)) from None
    if "\0" in content:
        raise ConfigError([Problem(str(path), "holds a zero byte", "name a text file")], str(path))
    return Source(path, content.replace("\r\n", "\n"))
