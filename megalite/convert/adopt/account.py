"""The account of an adopted configuration: an answer for every key, and the settings that they make together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megalite.config.sections.toml import shown


class Outcome(Enum):
    """The outcome for a key."""

    TAKEN = "taken"
    CHANGED = "changed"
    NO_EFFECT = "without effect here"
    REFUSED = "refused"


@dataclass(frozen=True)
class KeyAnswer:
    """The answer to one key.

    key: as written. value: as written, None for a switch. settings: `section.key` -> value of ours. reason: why it was
    changed, has no effect or is refused. remedy: what to do about a refused one. numbers: whether the training would
    compute other numbers without it (refused keys alone).
    """

    key: str
    value: Any
    outcome: Outcome
    settings: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    remedy: str = ""
    numbers: bool = False


@dataclass(frozen=True)
class SilentDefault:
    """A default of the other program that differs from ours, written into the run file since no key says it."""

    setting: str
    value: Any
    reason: str


@dataclass
class Account:
    """Every answer of a system to its files.

    system: the program's name. settings: `section.key` -> value, merged from all answers and silent defaults. launch:
    arguments of `megalite launch` that the files ask for, such as "--hostfile hosts". ranks: the number of processes
    that they start, None if unknown. notes: differences that no setting can remove, whether or not a key names them.
    script: which branches of a script were read, and which commands were not executed. continues: the commands, in
    their order, that go on with the run of an adopted checkpoint.
    """

    system: str
    answers: list[KeyAnswer] = field(default_factory=list)
    silent: list[SilentDefault] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    launch: list[str] = field(default_factory=list)
    ranks: int | None = None
    notes: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=list)
    continues: list[str] = field(default_factory=list)
    _set_by: dict[str, str] = field(default_factory=dict)

    def add(self, answer: KeyAnswer) -> None:
        """Add an answer and merge its settings; one that contradicts an earlier key becomes a refused one."""
        self._forget_defaults(answer.settings)
        for setting, value in answer.settings.items():
            if setting in self.settings and self.settings[setting] != value:
                other = f"{self._set_by[setting]} says {setting} = {shown(self.settings[setting])}"
                self.answers.append(
                    KeyAnswer(
                        answer.key,
                        answer.value,
                        Outcome.REFUSED,
                        reason=f"asks for {setting} = {shown(value)}, but {other}",
                        remedy="make the two agree",
                        numbers=not setting.startswith("monitor."),
                    )
                )
                return
        for setting, value in answer.settings.items():
            self.settings[setting] = value
            self._set_by.setdefault(setting, answer.key)
        self.answers.append(answer)

    def _forget_defaults(self, settings: Mapping[str, Any]) -> None:
        """Drop silent defaults that a key sets after all: a DeepSpeed JSON is answered after a script."""
        replaced = [default for default in self.silent if default.setting in settings]
        for default in replaced:
            self.silent.remove(default)
            del self.settings[default.setting], self._set_by[default.setting]

    def default(self, setting: str, value: Any, reason: str) -> None:
        """Set a setting that no key set to the other program's default. reason: whose default it is."""
        if setting not in self.settings:
            self.settings[setting] = value
            self._set_by[setting] = f"the default of {self.system}"
            self.silent.append(SilentDefault(setting, value, reason))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def with_outcome(self, outcome: Outcome) -> list[KeyAnswer]:
        return [answer for answer in self.answers if answer.outcome is outcome]

    @property
    def changes_numbers(self) -> bool:
        """Whether a refused key would change the numbers of the training."""
        return any(answer.numbers for answer in self.with_outcome(Outcome.REFUSED))
