"""One wrong input, and the small world that it is made wrong in."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megalite import cli
from tests.support.tiny import tiny_corpus, tiny_tokenizer
from tests.unit.config.runs import changed, write_run


@dataclass(frozen=True)
class Case:
    """make: spoils something in a world, and gives the command that finds it. said: parts of the one message, of which
    the first names the setting or the file, and the last the remedy.

    patch: what stands in the way of the command, as a full disk does. in_a_process: for commands that change the
    process they run in.
    """

    name: str
    make: Callable[[Path], list[str]]
    said: tuple[str, ...]
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    in_a_process: bool = False


def build_world(folder: Path) -> Path:
    """Valid inputs: texts, a tokenizer, and a token file of both; the cases' commands run in their folder."""
    (folder / "tok").mkdir(parents=True)
    tiny_tokenizer(folder / "tok")
    (folder / "text.txt").write_text("".join(tiny_corpus()), encoding="utf-8")
    lines = [json.dumps({"text": text}) + "\n" for text in tiny_corpus()]
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    assert cli.main(prepare(folder, "text.jsonl", "--output", str(folder / "good"))) == 0
    return folder


def prepare(world: Path, source: str, *flags: str) -> list[str]:
    """megalite data prepare of one of the world's files."""
    command = ["data", "prepare", "--source", str(world / source), "--workers", "0", *flags]
    command += [] if "--tokenizer" in flags else ["--tokenizer", str(world / "tok")]
    return command + ([] if "--output" in flags else ["--output", str(world / "out" / "x")])


def write(world: Path, name: str, content: bytes | str) -> str:
    path = world / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def train(world: Path, **changes: object) -> list[str]:
    """megalite train of a tiny run on the world's token file; `data__source` stands for data.source."""
    settings: dict[str, object] = {
        "run.folder": str(world / "run"),
        "model.num_hidden_layers": 1,
        "training.precision": "fp32",
        "training.threads": 1,
        "tokenizer.vocab_size": None,
        "tokenizer.path": str(world / "tok"),
        "data.source": str(world / "good"),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    tables = changed({})
    for name, value in settings.items():
        section, key = name.split(".")
        tables.setdefault(section, {})[key] = value
    tables = {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
    }
    return ["train", str(write_run(world, tables))]
