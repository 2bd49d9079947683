"""A run that reads its text while it trains: the same curve in any layout and after a stop, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite import Trainer, load_config
from megalite.checkpoint.folder import read_manifest
from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError, DataError
from tests.support.jobs import curve, training_here
from tests.support.parity import LAYOUT_RTOL, assert_close
from tests.support.tiny import tiny_corpus, tiny_tokenizer
from tests.support.tiny_run import SETTINGS

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

STEPS = 9
TWO_COPIES = {"parallel.data": 2, "training.micro_batch_size": 2}


@pytest.fixture
def text(tmp_path: Path) -> list[Path]:
    """One file of each kind, of 60 documents each, and a tokenizer."""
    tiny_tokenizer(tmp_path)
    texts = tiny_corpus(120)
    paths = [tmp_path / "a.jsonl", tmp_path / "b.parquet"]
    paths[0].write_text("".join(json.dumps({"text": each}) + "\n" for each in texts[:60]))
    parquet.write_table(pyarrow.table({"text": texts[60:]}), paths[1], row_group_size=13)
    return paths


def streaming(folder: Path, text: list[Path], **changes: Any) -> RunConfig:
    settings = {
        **SETTINGS,
        "model.vocab_size": "auto",
        "training.steps": STEPS,
        "optimizer.schedule": "constant",
        "training.global_batch_size": 4,
        "run.folder": folder,
        "data.source": list(map(str, text)),
        "data.streaming": True,
        "data.document_mask": True,
        "tokenizer.path": str(text[0].parent / "tokenizer.json"),
        "checkpoint.every": 3,
        "checkpoint.export": False,
        **changes,
    }
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return load_config(None, **sections)


def test_every_layout_goes_on_where_another_stopped(text: list[Path], tmp_path: Path, capsys: Any) -> None:
    Trainer(streaming(tmp_path / "whole", text)).train()
    said = capsys.readouterr().out
    size = sum(each.stat().st_size for each in text) / 1e3
    assert f"data: streams {size:.1f} kB in 2 files, 4 parts at once (data.streaming)" in said
    assert not (tmp_path / "whole" / "data").exists() and "tokenizing" not in said
    Trainer(streaming(tmp_path / "parts", text, **{"training.steps": 3})).train()
    Trainer(streaming(tmp_path / "parts", text, **TWO_COPIES, **{"training.steps": 6})).train()
    Trainer(streaming(tmp_path / "parts", text, **{"parallel.tensor": 2, "parallel.pipeline": 2})).train()
    found, expected = curve(tmp_path / "parts"), curve(tmp_path / "whole")
    assert [each[0] for each in found] == [*range(1, STEPS + 1)] == [each[0] for each in expected]
    for column in (1, 2):
        assert_close([each[column] for each in found], [each[column] for each in expected], rtol=LAYOUT_RTOL)
    # The run in one piece had read later batches when it wrote those of step 3 and 6.
    for name in ("step-000003", "step-000006", "step-000009"):
        stream, other = (
            read_manifest(tmp_path / run / "checkpoints" / name).stream for run in ("whole", "parts")
        )
        assert stream is not None and stream == other
    assert stream.files == tuple((each.name, each.stat().st_size) for each in text) and len(stream.lanes) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"data.streaming": False},
            "data.streaming: false is not true, that of .*step-000003.*; use true, or a new run",
        ),
        (
            {"training.global_batch_size": 8},
            "training.global_batch_size: 8 is not that of .*step-000003.*; use 4, or a new run.folder",
        ),
        (
            {"data.source": "b.parquet"},
            "data.source: 1 files are not the 2 of the steps before.*name the same files",
        ),
    ],
    ids=["no stream", "other batch", "fewer files"],
)
def test_a_stream_that_would_not_go_on_is_refused(
    text: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    Trainer(streaming(run, text, **{"training.steps": 3})).train()
    with pytest.raises(ConfigError, match=said), training_here():
        Trainer(streaming(run, text, **changes)).train()


def test_a_bad_line_far_into_the_text_stops_the_run_and_can_be_skipped(
    text: list[Path], tmp_path: Path
) -> None:
    lines = text[0].read_bytes().splitlines(keepends=True)
    size = text[0].stat().st_size
    text[0].write_bytes(b"".join([*lines[:14], b"{".ljust(len(lines[14]) - 1) + b"\n", *lines[15:]]))
    run = streaming(tmp_path / "run", text, **{"data.shuffle": False, "training.steps": 20})
    with pytest.raises(DataError, match=rf"a.jsonl, line 15: not JSON.*keeps its {size:,} bytes"):
        Trainer(run).train()
    text[0].write_bytes(b"".join([*lines[:14], b" " * (len(lines[14]) - 1) + b"\n", *lines[15:]]))
    Trainer(run).train()
    assert len(curve(tmp_path / "run")) == 20
