"""Files that are no plain mapping are one clear error each: nothing of them runs, and little of them is kept."""

from pathlib import Path

import pytest

from megalite.cli import main
from megalite.convert.adopt.sources import Source
from megalite.errors import ConfigError

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "a tag that calls": ("num_layers: !!python/object/apply:os.system ['touch BAD']", "asks for an object"),
    "a tag that names": ("num_layers: !!python/name:os.system ''", "asks for an object"),
    "a tag of its own": ("num_layers: !six 6", "the tag !six"),
    "binary": ("num_layers: !!binary aGVsbG8=", "asks for an object"),
    "aliases that make billions": (LAUGHS, "its aliases make more than"),
    "an alias of itself": ("num_layers: &a [*a]", "an alias holds itself"),
    "a merge of itself": ("num_layers: &a\n  <<: *a", "an alias holds itself"),
    "deep brackets": ("[" * 20_000, "is nested more than"),
    "deep lines": ("\n".join(" " * depth + "a:" for depth in range(400)), "is nested more than"),
    "a key twice": (
        "num_layers: 6\nhidden_size: 512\nnum_layers: 7",
        r"line 3: the key num_layers",
    ),
    "a key twice, below": ("optimizer: {type: Adam, type: Lion}", "the key type is already in line 1"),
    "a list": ("- num_layers", "holds no mapping"),
    "a word": ("num_layers", "holds no mapping"),
    "nothing": ("", "holds no mapping"),
    "two documents": ("num_layers: 6\n---\nnum_layers: 7", "another document"),
    "a tab": ("optimizer:\n\ttype: Adam", "line 2"),
    "a list as key": ("? [a]\n: 1", "a key is no text"),
    "a number of 5,000 digits": ("num_layers: " + "9" * 5000, "cannot be read"),
    "a control character": ("num_layers: \x01", "special characters"),
    "many lines": ("".join(f"key{number}: 1\n" for number in range(40_000)), "has more than"),
}
HOSTILE_JSON = {
    "a key twice": ('{"output_dir": "a", "output_dir": "b"}', "twice"),
    "deep brackets": ("[" * 100_000, "nested too deeply"),
    "a list": ("[1]", "holds no mapping"),
    "half": ('{"output_dir": ', "line 1"),
    "a number of 5,000 digits": ('{"seed": ' + "9" * 5000 + "}", "digits"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_yaml_is_one_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text, message = HOSTILE[name]
    Path("a.yml").write_text(text)
    assert main(["adopt", "a.yml"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("a.yml") == 1
    assert len(shown.err) < 400
    assert [path.name for path in tmp_path.iterdir()] == ["a.yml"]
    with pytest.raises(ConfigError, match=message):
        Source(Path("a.yml"), text).mapping()


@pytest.mark.parametrize("name", HOSTILE_JSON)
def test_a_hostile_json_is_one_error(name: str) -> None:
    text, message = HOSTILE_JSON[name]
    with pytest.raises(ConfigError, match=message):
        Source(Path("a.json"), text).mapping()


def test_a_file_of_100_mb_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    assert main(["adopt", str(path)]) == 2


def test_plain_values_stay_what_they_are() -> None:
    text = "on: yes\n1: 2001-01-01\nlr: 1e-4\nrate: -.5e+3\ntime: 1:30\nmode: 0123\n"
    text += "base: &b {x: 1}\nother: {<<: *b, y: ~}\nlist: [1, *b]"
    assert Source(Path("a.yml"), text).mapping() == {
        "on": True,
        "1": "2001-01-01",
        "lr": 1e-4,
        "rate": -500.0,
        "time": "1:30",
        "mode": "0123",
        "base": {"x": 1},
        "other": {"x": 1, "y": None},
        "list": [1, {"x": 1}],
    }


def test_a_file_with_keys_of_no_program_names_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yml"
    path.write_text("colour: red")
    assert main(["adopt", str(path)]) == 2
    assert "GPT-NeoX" in capsys.readouterr().err
