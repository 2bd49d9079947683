"""Whatever values its keys have, a file is answered key by key, and its run file is TOML."""

import random
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.convert.adopt.report import account_lines, run_file_text
from megalite.convert.adopt.rules import KeyRule
from megalite.convert.adopt.sources import Source
from megalite.convert.adopt.systems import KEYED

SYSTEMS: Mapping[str, Any] = {each.name: each for each in KEYED}
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3.5,
        float("nan"),
        float("inf"),
        10**30,
        "",
        "x",
        "1e-4",
        "none",
        "\x7f",
        "a,b",
    ),
    *([], {}, [1], ["a"], [[]], [None], [{}], [["flash"], 2], {"a": 1}, {"enabled": True}, {"path": "x"}),
    *({"stage": 1}, [{"path": "data.jsonl", "type": "alpaca"}]),
)


def any_table(rules: Mapping[str, KeyRule], draw: random.Random) -> dict[str, Any]:
    """A table with some of the keys of a system, with values of any kind."""
    table: dict[str, Any] = {}
    for key in draw.sample(sorted(rules), draw.randint(1, 40)):
        *path, last = key.split(".")
        inner = table
        for part in path:
            below = inner.setdefault(part, {})
            inner = below if isinstance(below, dict) else {}
        inner[last] = deepcopy(draw.choice(VALUES))
    return table


@pytest.mark.extended
@pytest.mark.parametrize("name", SYSTEMS)
def test_any_values_of_a_systems_keys_are_answered(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    system, draw = SYSTEMS[name], random.Random(31)
    for _ in range(120):
        table = any_table(system.rules, draw)
        account = system.read([Source(Path("a.yml"), yaml.safe_dump(table))])
        assert list(account_lines(account))
        tomllib.loads(run_file_text(account, "a.yml"))
        answers = {each.key.split(":")[0].split(".")[0] for each in account.answers}
        assert answers >= set(table)
