"""The keys of a system whose answer needs no code: a TOML file beside the code that answers the others.

    harmless = [false, "none"]              # the values that a refused key may have, unless its table says others
    [take.whole]                            # or take.number, take.text: the value becomes that of a setting
    lora_r = "adapter.rank"
    seed = ["run.seed", "the note behind it"]
    [switch]
    use_dora = { on = { "adapter.dora" = true } }
    [words.norm]
    remedy = "use layernorm"
    words.layernorm = { "model.norm" = "layer_norm" }
    [without_effect]
    "megalite writes metrics.jsonl" = "report_to run_name"
    [[refused]]                             # numbers = false: the training has the same numbers without the key
    reason = "megalite has no such model"
    remedy = "leave it out"
    keys = "use_mup use_moe"

A name may stand for several keys, separated by spaces.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from megalite.convert.adopt.rules import (
    OFF,
    KeyRule,
    NoEffect,
    Refuse,
    Switch,
    Take,
    WordsOf,
    number,
    text,
    whole,
)

_PARSERS: Mapping[str, Callable[[Any], Any]] = {"whole": whole, "number": number, "text": text}
_Settings = dict[str, Any]


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _SwitchRow(_Row):
    on: _Settings
    off: _Settings = {}


class _WordsRow(_Row):
    remedy: str
    words: dict[str, _Settings]


class _RefusedRow(_Row):
    reason: str
    remedy: str
    keys: str
    harmless: list[Any] | None = None
    numbers: bool = True


class _Table(_Row):
    harmless: list[Any] = [*OFF]
    take: dict[Literal["whole", "number", "text"], dict[str, str | list[str]]] = {}
    switch: dict[str, _SwitchRow] = {}
    words: dict[str, _WordsRow] = {}
    without_effect: dict[str, str] = {}
    refused: list[_RefusedRow] = []

    def rules(self) -> Iterator[tuple[str, KeyRule]]:
        """Yield (names separated by spaces, their rule)."""
        for kind, rows in self.take.items():
            for keys, row in rows.items():
                setting, *note = row if isinstance(row, list) else [row]
                yield keys, Take(setting, _PARSERS[kind], *note)
        for keys, switch in self.switch.items():
            yield keys, Switch(switch.on, switch.off)
        for keys, choice in self.words.items():
            yield keys, WordsOf(choice.words, choice.remedy)
        for reason, keys in self.without_effect.items():
            yield keys, NoEffect(reason)
        for refused in self.refused:
            harmless = self.harmless if refused.harmless is None else refused.harmless
            yield refused.keys, Refuse(refused.reason, refused.remedy, harmless, refused.numbers)


def read_table(code: str) -> dict[str, KeyRule]:
    """Return key -> rule of the table beside a module. code: the module's file.

    Raises ValueError for a table of another form and for a key that stands twice.
    """
    path = Path(code).with_suffix(".toml")
    rules: dict[str, KeyRule] = {}
    for keys, rule in _Table.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).rules():
        for key in keys.split():
            if key in rules:
                raise ValueError(f"{path.name} has the key {key} twice")
            rules[key] = rule
    return rules
