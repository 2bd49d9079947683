"""How a system's table says what becomes of each key: `{"num_layers": Take("model.num_hidden_layers", whole), ...}`."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megalite.config.sections.unchecked import did_you_mean
from megalite.convert.adopt.account import Account, KeyAnswer, Outcome

ON = (None, True, "true", "True")
"""The values of a switch that is on: a flag without a value, or a YAML's true."""
OFF = (False, "false", "False")


@dataclass
class Reading:
    """The keys of a system's files, answered one after the other into an account.

    keys: key as written -> value as written; a flag without a value has None. names: key of the table -> key as
    written, where the two differ ("num-layers" -> "--num-layers"). folder: of the first file, for paths beside it.
    """

    account: Account
    keys: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    folder: Path = field(default_factory=Path)

    def has(self, key: str) -> bool:
        return key in self.keys

    def get(self, key: str, default: Any = None) -> Any:
        return self.keys.get(key, default)

    def is_on(self, key: str) -> bool:
        """Return whether a switch is given and not switched off."""
        return key in self.keys and self.keys[key] in ON

    def take(self, key: str, settings: Mapping[str, Any], reason: str = "") -> None:
        """Answer a key that means the same here; reason: a note behind it. No settings: it already is so here."""
        self._answer(key, Outcome.TAKEN, settings, reason)

    def change(self, key: str, settings: Mapping[str, Any], reason: str) -> None:
        """Answer a key whose setting of ours has another meaning or value. reason: the difference."""
        self._answer(key, Outcome.CHANGED, settings, reason)

    def no_effect(self, key: str, reason: str) -> None:
        """Answer a key that changes nothing here. reason: why."""
        self._answer(key, Outcome.NO_EFFECT, {}, reason)

    def refuse(self, key: str, reason: str, remedy: str, *, numbers: bool = True) -> None:
        """Answer a key that cannot be taken. numbers: whether the training computes other numbers without it."""
        if key not in self.answered:
            self.answered.add(key)
            written, value = self.names.get(key, key), self.keys.get(key)
            self.account.add(KeyAnswer(written, value, Outcome.REFUSED, {}, reason, remedy, numbers))

    def _answer(self, key: str, outcome: Outcome, settings: Mapping[str, Any], reason: str) -> None:
        # A rule over several keys may name some that the file lacks.
        if key in self.keys and key not in self.answered:
            self.answered.add(key)
            self.account.add(
                KeyAnswer(self.names.get(key, key), self.keys[key], outcome, dict(settings), reason)
            )


class KeyRule(Protocol):
    """Gives one key its answer."""

    def answer(self, reading: Reading, key: str, value: Any) -> None:
        """Give the key its answer. Raises ValueError, with what the value should be, for an unusable value."""


@dataclass(frozen=True)
class Take:
    """The value becomes that of `setting`. parse: raises ValueError; note: printed behind it."""

    setting: str
    parse: Callable[[Any], Any]
    note: str = ""

    def answer(self, reading: Reading, key: str, value: Any) -> None:
        reading.take(key, {self.setting: self.parse(value)}, self.note)


@dataclass(frozen=True)
class Change:
    """As Take, for a value with another meaning here. difference: says it."""

    setting: str
    parse: Callable[[Any], Any]
    difference: str

    def answer(self, reading: Reading, key: str, value: Any) -> None:
        reading.change(key, {self.setting: self.parse(value)}, self.difference)


@dataclass(frozen=True)
class Switch:
    """Settings that hold where the switch is on; off: `off`'s, else it has no effect."""

    on: Mapping[str, Any]
    off: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def answer(self, reading: Reading, key: str, value: Any) -> None:
        if switch(value):
            reading.take(key, self.on, self.note)
        elif self.off:
            reading.take(key, self.off, self.note)
        else:
            reading.no_effect(key, "it is off")


@dataclass(frozen=True)
class WordsOf:
    """A word becomes settings of ours. words: their word -> settings; others are refused with `remedy`."""

    words: Mapping[Any, Mapping[str, Any]]
    remedy: str

    def answer(self, reading: Reading, key: str, value: Any) -> None:
        if isinstance(value, str | int | None) and value in self.words:
            reading.take(key, self.words[value])
        else:
            reading.refuse(key, "megalite has no such choice", self.remedy)


@dataclass(frozen=True)
class NoEffect:
    """The key changes nothing here."""

    reason: str

    def answer(self, reading: Reading, key: str, value: Any) -> None:
        reading.no_effect(key, self.reason)


@dataclass(frozen=True)
class Refuse:
    """The key cannot be taken, unless its value is a harmless one. numbers: whether it would change the numbers."""

    reason: str
    remedy: str
    harmless: Collection[Any] = OFF
    numbers: bool = True

    def answer(self, reading: Reading, key: str, value: Any) -> None:
        # True equals 1, but a switch that is on is no count of 1.
        if value in (option for option in self.harmless if (value is True) <= (option is True)):
            reading.no_effect(key, "this value is what megalite does")
        else:
            reading.refuse(key, self.reason, self.remedy, numbers=self.numbers)


@dataclass(frozen=True)
class Together:
    """The key is read with others. read: answers this key, and may answer them."""

    read: Callable[[Reading, str, Any], None]

    def answer(self, reading: Reading, key: str, value: Any) -> None:
        self.read(reading, key, value)


def computed(readers: Mapping[Callable[[Reading, str, Any], None], str]) -> dict[str, KeyRule]:
    """Return the rules of keys that code answers. readers: function -> its keys, with spaces between."""
    return {key: Together(read) for read, keys in readers.items() for key in keys.split()}


def apply_rules(reading: Reading, rules: Mapping[str, KeyRule]) -> None:
    """Answer every key by its rule. A key without one, or with an unusable value, is refused."""
    for key, value in reading.keys.items():
        if key in reading.answered:
            continue
        rule = rules.get(key)
        if rule is None:
            meant = did_you_mean(key, rules) or "remove it, or find its meaning and set it in run.toml"
            reading.refuse(key, f"is no key of {reading.account.system} that megalite knows", meant)
            continue
        try:
            rule.answer(reading, key, value)
        except (ValueError, ArithmeticError) as error:
            reading.refuse(key, str(error), "correct it")
        if key not in reading.answered:
            reading.refuse(key, "has no rule for this value", "set it in run.toml by hand")


def whole(value: Any) -> int:
    """Return a whole number, also one written as 1e6. Raises ValueError."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        return int(value)  # exact above 2 ** 53 too
    figure = number(value)
    if figure != int(figure):
        raise ValueError(f"{value!r} is no whole number")
    return int(figure)


def number(value: Any) -> float:
    """Return a finite number as float. Raises ValueError."""
    try:
        if isinstance(value, bool):
            raise ValueError
        figure = float(str(value).replace("_", ""))
    except ValueError:
        raise ValueError(f"{value!r} is no number") from None
    if not math.isfinite(figure):
        raise ValueError(f"{value!r} is no finite number")
    return figure


def text(value: Any) -> str:
    """Return a text. Raises ValueError for nothing, a list or a table."""
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value):
        raise ValueError(f"{value!r} is no text")
    return str(value)


def switch(value: Any) -> bool:
    """Return whether a switch is on. Raises ValueError for a value that is neither on nor off."""
    if value in ON:
        return True
    if value in OFF:
        return False
    raise ValueError(f"{value!r} is neither true nor false")
