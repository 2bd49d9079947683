"""The TOML tables of the adopted programs: their form is checked, and their settings are megalite's."""

from pathlib import Path

import pytest

from megalite.config.sections.describe import setting
from megalite.convert.adopt.keyed import axolotl, llama_factory, trainer
from megalite.convert.adopt.megatron import rules as megatron
from megalite.convert.adopt.neox import system as neox
from megalite.convert.adopt.rule_table import read_table
from megalite.convert.adopt.rules import Change, Refuse, Switch, Take, WordsOf

MODULES = [module.__file__ for module in (megatron, neox, trainer, llama_factory, axolotl)]


@pytest.mark.parametrize("code", MODULES, ids=lambda code: "-".join(Path(code).parts[-2:]))
def test_every_setting_of_a_table_is_one_of_megalites(code: str) -> None:
    settings: set[str] = set()
    for rule in read_table(code).values():
        if isinstance(rule, Take | Change):
            settings.add(rule.setting)
        elif isinstance(rule, Switch):
            settings |= {*rule.on, *rule.off}
        elif isinstance(rule, WordsOf):
            settings |= {name for word in rule.words.values() for name in word}
    own = {name for name in settings if not name.startswith("deepspeed.")}
    assert len(own) > 10 and all(setting(name).description for name in own)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('[take.whole]\n"a b" = "x.y"\n[without_effect]\n"it is off" = "c b"', "the key b twice"),
        ('[take.float]\na = "x.y"', "take.float"),
        ('[[refused]]\nreason = "megalite lacks it"\nkeys = "a"', "remedy"),
        ("[switch]\na = { on = {}, of = {} }", "of"),
        ('[taken]\na = "x.y"', "taken"),
    ],
)
def test_a_table_of_another_form_is_refused(table: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "program.toml").write_text(table)
    with pytest.raises(ValueError, match=said):
        read_table(str(tmp_path / "program.py"))


def test_a_refused_key_may_have_the_values_of_its_table_or_of_the_file(tmp_path: Path) -> None:
    rows = '[[refused]]\nreason = "no"\nremedy = "leave it out"\nkeys = "a b"\n'
    (tmp_path / "program.toml").write_text(f"harmless = [1]\n{rows}{rows.replace('a b', 'c')}harmless = []\n")
    rules = read_table(str(tmp_path / "program.py"))
    assert [rule.harmless for rule in rules.values() if isinstance(rule, Refuse)] == [[1], [1], []]
