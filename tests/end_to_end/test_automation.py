"""A program that knows --json alone: from a text to a served model, through mistakes that their remedies repair."""

import importlib.util
import io
import json
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import main
from tests.support.documents import TEXT, documented
from tests.support.jobs import ROOT

_SPEC = importlib.util.spec_from_file_location("drive", ROOT / "examples/automation/drive.py")
assert _SPEC is not None and _SPEC.loader is not None
drive = importlib.util.module_from_spec(_SPEC)
sys.modules["drive"] = drive  # its dataclass looks there for its own module
_SPEC.loader.exec_module(drive)

LAYOUT = {
    "--parallel.tensor": 3,  # of 4 heads
    "--parallel.pipeline": 9,  # of 2 layers
    "--training.global_batch_size": 7,  # of micro batches of 2
    "--deepspeed.zero_optimization.stage": 2,  # beside a pipeline
    "--training.compile": True,  # beside tensor parallelism
    "--parallel.virtual_stages": 5,
}
RUN = """\
[run]
folder = "runs/driven"
[data]
source = "bok.txt"
[tokenizer]
path = "words"
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 64
[optimiser]
learning_rate = 0.01
[training]
steps = "6"
epochs = 1
sequence_lenght = 500
micro_batch_size = 2
micro_batches = 2
precision = "fp23"
[checkpoint]
every = 3
resume = "runs/nowhere"
[validation]
every = 2
[adapter]
kind = "lora"
"""
# The mistakes: in tokenizer, launch, train, evaluate, generate, convert and serve.
PLANTED = {
    *("COMMAND", "--source", "--knid", "--kind", "--output"),
    *("parallel.tensor", "parallel.pipeline", "training.global_batch_size", "parallel.virtual_stages"),
    *("deepspeed.zero_optimization.stage", "training.compile"),
    *("rn.toml", "data.source", "tokenizer.path", "optimiser", "training.sequence_lenght"),
    *(
        "training.sequence_length",
        "training.precision",
        "checkpoint.resume",
        "validation.every",
    ),
    *(
        "adapter.kind",
        "MODEL",
        "--window",
        "--temperature",
        "OUTPUT",
        "--tensor",
        "--context-length",
        "--port",
    ),
}


DOCUMENTED = ("tokenizer train", "launch", "train", "evaluate", "generate", "convert export")


def here(command: Any) -> dict[str, Any]:
    """Run a command as `drive.run` does, but in this process."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(command.line()[len(drive.MEGALITE) :])
    document: dict[str, Any] = json.loads(out.getvalue())
    assert document["exit_code"] == code and out.getvalue().count("\n") == 1
    if "error" not in document:
        name = next(words for words in (" ".join(command.words[:2]), command.words[0]) if words in DOCUMENTED)
        always, every = documented(name)
        assert always <= document.keys() <= every, name
    return document


@pytest.fixture
def repaired_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The keys of the problems that the driver repairs."""
    keys, repair = set[str](), drive.repair

    def noted(command: Any, problem: Mapping[str, Any]) -> None:
        keys.add(problem["key"].removeprefix("--") if "." in problem["key"] else problem["key"])
        repair(command, problem)

    monkeypatch.setattr(drive, "repair", noted)
    yield keys


def test_a_program_goes_from_a_text_to_a_served_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repaired_keys: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    Path("run.toml").write_text(RUN)
    # Two words, an option, its value and a file that do not exist; then an output that does.
    for _ in range(2):
        options = {"--source": "bok.txt", "--output": "tok", "--knid": "bep"}
        made = drive.repaired(drive.Command(["tokenizer", "trian"], options), here)
    assert made["vocab_size"] > 256 and Path("tok/tokenizer.json").is_file()

    planned = drive.repaired(drive.Command(["lanuch", "rn.toml", "--dry-run", "--local"], dict(LAYOUT)), here)
    assert planned["layout"]["tensor"] == 2 and planned["layout"]["pipeline"] == 2

    trained = drive.repaired(drive.Command(["train", "run.toml"]), here)
    assert trained["state"] == "ended" and trained["step"] == trained["total_steps"] == 6
    run, export = trained["folder"], trained["export"]

    wrong = {"--data": "bok.txt", "--window": 500}
    measured = drive.repaired(drive.Command(["evaluate", "runs/drivn"], wrong), here)
    assert 1 < measured["figures"]["perplexity"] < made["vocab_size"]

    generated = drive.repaired(
        drive.Command(["generate", run], {"--prompt": "The", "--temperature": -1.0, "--tokens": 900}), here
    )
    assert 0 < generated["new_tokens"] < 64

    Path("taken").mkdir()
    Path("taken/notes.txt").write_text("not to be replaced")
    exported = drive.repaired(drive.Command(["convert", "exprot", run, "taken"]), here)
    assert Path(exported["output"], "config.json").is_file() and Path("taken/notes.txt").is_file()

    with socket.create_server(("127.0.0.1", 0)) as other:
        wrong = {"--port": other.getsockname()[1], "--tensor": 3, "--context-length": 900}
        server = drive.Server()
        served = drive.repaired(drive.Command(["serve", export], wrong), server.start)
        try:
            assert served["port"] not in (0, wrong["--port"])
            assert drive.complete(served["url"], served["model"], "In the")
        finally:
            server.stop()
    assert server.process.returncode == 0
    assert repaired_keys >= PLANTED and len(PLANTED) > 20
