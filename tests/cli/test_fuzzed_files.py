"""Whatever bytes a file has, the command that reads it works or ends with one error, and never with a traceback."""

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite import cli
from tests.cli.bad_input.case import build_world, prepare, train, write
from tests.cli.bad_input.spoil import spoiled
from tests.cli.bad_input.tokenizers import sentencepiece_model


@dataclass(frozen=True)
class Kind:
    """A file of the world, and the command that reads it."""

    file: str
    command: Callable[[Path], list[str]]


def convert(name: str) -> Callable[[Path], list[str]]:
    return lambda world: ["tokenizer", "convert", str(world / name), "--output", str(world / "made"), *END]


def of_prefix(world: Path) -> list[str]:
    """A run that takes its tokenizer from what the token file's manifest says; with no run in it that starts."""
    return train(world, tokenizer__path=None, data__split=[0.5, 0.5])


END = ["--end-of-document", "</s>"]
KINDS = {
    "index": Kind("good.idx", lambda world: ["data", "inspect", str(world / "good")]),
    "manifest, shown": Kind("good.json", lambda world: ["data", "inspect", str(world / "good")]),
    "manifest, of a run": Kind("good.json", of_prefix),
    "journal": Kind("out/.x.journal", lambda world: prepare(world, "text.jsonl")),
    "jsonl": Kind("text.jsonl", lambda world: prepare(world, "text.jsonl")),
    "gzip": Kind("text.txt.gz", lambda world: prepare(world, "text.txt.gz")),
    "saved set": Kind("set/state.json", lambda world: prepare(world, "set")),
    "tokenizer": Kind("tok/tokenizer.json", lambda world: prepare(world, "text.jsonl")),
    "tokenizer's configuration": Kind(
        "tok/tokenizer_config.json",
        lambda world: ["tokenizer", "convert", str(world / "tok"), "--output", str(world / "made")],
    ),
    "sentencepiece unigram": Kind("unigram.model", convert("unigram.model")),
    "sentencepiece BPE": Kind("bpe.model", convert("bpe.model")),
    "vocabulary": Kind("gpt2/vocab.json", convert("gpt2")),
    "merges": Kind("gpt2/merges.txt", convert("gpt2")),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gzip

    world = build_world(tmp_path_factory.mktemp("fuzz"))
    write(world, "text.txt.gz", gzip.compress((world / "text.txt").read_bytes()))
    write(world, "set/state.json", json.dumps({"_data_files": [{"filename": "a.arrow"}], "_split": None}))
    write(
        world, "tok/tokenizer_config.json", json.dumps({"eos_token": "<|endoftext|>", "tokenizer_class": "X"})
    )
    write(world, "unigram.model", sentencepiece_model())
    write(world, "bpe.model", sentencepiece_model(model_type="bpe"))
    write(world, "gpt2/vocab.json", json.dumps({"a": 0, "b": 1, "ab": 2, "</s>": 3}))
    write(world, "gpt2/merges.txt", "#version: 0.2\na b\n")
    write(world, "out/.x.journal", json.dumps({"fingerprint": "", "outputs": [], "place": {}, "writers": []}))
    return world


@pytest.mark.parametrize("kind", list(KINDS))
@settings(
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_command_says_what_is_wrong(
    world: Path, monkeypatch: pytest.MonkeyPatch, kind: str, data: st.DataObject
) -> None:
    monkeypatch.setattr("megalite.train.run.prepare_process", lambda *_, **__: 1)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(shutil.copytree(world, Path(name) / "world"))
        path = copy / KINDS[kind].file
        path.write_bytes(spoiled(path.read_bytes(), data))
        told, out = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(out):
            code = cli.main(KINDS[kind].command(copy))
    said = told.getvalue()
    assert (code, said.count("error: ")) in ((0, 0), (2, 1)) and "Traceback" not in said, said
