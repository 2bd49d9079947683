"""A run's settings before they are checked: values, their origins, and the problems found while reading."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from megalite.errors import Problem

DEFAULT = "default"
DERIVED = "derived"


@dataclass
class SettingsDraft:
    """Section -> key -> value. A key's origin is a file, a flag, a preset, a key of DeepSpeed's JSON or "derived"."""

    source: str
    """The run file as the user named it."""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Messages for the user that are no errors."""
    unset: set[str] = field(default_factory=set)
    """Each `section.key` that a flag leaves at its default."""
    incomplete: set[str] = field(default_factory=set)
    """Sections with a part that could not be read; keys missing there are not reported again."""

    def section(self, name: str) -> dict[str, Any]:
        """Return the section's table, created if missing; a detached empty one if RUN.toml has a plain value there."""
        section = self.values.setdefault(name, {})
        return section if isinstance(section, dict) else {}

    def set(self, section: str, key: str, value: Any, origin: str) -> None:
        self.section(section)[key] = value
        self.origins[f"{section}.{key}"] = origin

    def drop(self, section: str, key: str) -> None:
        """Forget an unknown key, and its section if that has no other."""
        table = self.values.get(section)
        if isinstance(table, dict):
            table.pop(key, None)
            if not table:
                del self.values[section]

    def take_out(self, section: str, key: str) -> Any:
        """Remove a key and return its value; None where it is not set."""
        return self.section(section).pop(key, None)

    def given_by_flag(self, key: str) -> bool:
        return self.origin(key).startswith("--")

    def set_behind(self, section: str, values: Mapping[str, Any], origin: str, *, named_by: str) -> None:
        """Set the values of keys that the section does not have.

        named_by: the setting that names the source of the values. If a flag set it, they also replace the file's
        values, but never those of other flags.
        """
        before_file = self.given_by_flag(named_by)
        for key, value in values.items():
            full = f"{section}.{key}"
            if self.is_open(section, key) or (before_file and not self.given_by_flag(full)):
                self.set(section, key, value, origin)

    def has(self, section: str, key: str) -> bool:
        return isinstance(self.values.get(section), dict) and key in self.values[section]

    def is_open(self, section: str, key: str) -> bool:
        """Return whether a preset or a file may set the key: nothing sets it, and no flag leaves it at its default."""
        return not self.has(section, key) and f"{section}.{key}" not in self.unset

    def origin(self, key: str) -> str:
        """Return where the value of `section.key` came from."""
        return self.origins.get(key, DEFAULT)

    def problem(self, key: str, message: str, remedy: str = "", set: Mapping[str, Any] | None = None) -> None:
        self.problems.append(Problem(key, message, remedy, set or {}))

    def value(self, key: str) -> Any:
        """Return the value of `section.key` or of a key further inside; None without one."""
        value: Any = self.values
        for name in key.removeprefix("--").split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a remedy with the closest match among `known`; "" if none is close."""
    close = closest_name(word, known)
    return f"did you mean {close}?" if close else ""


def closest_name(word: str, known: Iterable[str]) -> str:
    """Return the name among `known` whose last part is most like a word; "" if none is close."""
    by_last = {name.rsplit(".", 1)[-1]: name for name in known}
    close = get_close_matches(word, by_last, n=1, cutoff=0.6)
    return by_last[close[0]] if close else ""
