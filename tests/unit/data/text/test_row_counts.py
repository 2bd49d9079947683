"""Keys of rows and messages without effect are counted and named, in every kind of data and wherever a run begins."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megalite.cli import main
from megalite.data.files.prepared import prepared_facts
from megalite.data.prepare import prepare
from megalite.data.prepare.prepare import Preparation, prepare_outputs
from megalite.data.text.corpus import Corpus
from megalite.data.text.row_counts import RowCounts
from megalite.data.tokenizers.tokenizer import Tokenizer

ASKED, ANSWERED = {"role": "user", "content": "the tensor?"}, {"role": "assistant", "content": "waits"}
# data.kind, a row, and the line about it with the keys "foo" in each row and "bar" in each message.
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("text", {"text": "the tensor waits"}, "'foo' in 1 of 2 rows"),
    ("instruct", {"prompt": "the tensor?", "completion": "waits"}, "'foo' in 1 of 2 rows"),
    ("instruct", {"instruction": "the tensor?", "output": "waits"}, "'foo' in 1 of 2 rows"),
    ("instruct", {"messages": [ASKED, ANSWERED]}, "'foo' in 1 of 2 rows; 'bar' in 2 of 4 messages"),
    (
        "instruct",
        {"conversations": [{"from": "human", "value": "the tensor?"}, {"from": "gpt", "value": "waits"}]},
        "'foo' in 1 of 2 rows; 'bar' in 2 of 4 messages",
    ),
    (
        "preference",
        {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [ANSWERED | {"content": "goes"}]},
        "'foo' in 1 of 2 rows; 'bar' in 4 of 8 messages",
    ),
]


def planted(row: dict[str, Any]) -> dict[str, Any]:
    """The row with an unknown key in itself and in each of its messages."""
    lists = {
        key: [message | {"bar": 1} for message in value]
        for key, value in row.items()
        if isinstance(value, list)
    }
    return {**row, **lists, "foo": 1}


def prepared(source: Path, kind: str, tokenizer: Tokenizer, *options: str) -> Path:
    prefix = source.with_name("prepared")
    chat = [] if kind == "text" else ["--sequence-length", "99"]
    chat += [] if kind == "text" or "--chat-template" in options else ["--chat-template", "plain"]
    named = ["--source", str(source), "--tokenizer", str(tokenizer.file.parent), "--output", str(prefix)]
    assert main(["data", "prepare", "--kind", kind, *named, *chat, "--workers", "0", *options]) == 0
    return prefix


@pytest.mark.parametrize(("kind", "row", "said"), ROWS)
def test_a_planted_key_is_named_where_data_are_prepared_and_inspected(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], kind: str, row: Any, said: str
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(f"{json.dumps(row)}\n{json.dumps(planted(row))}\n")
    line = f"data: keys without effect in {source}: {said}\n"
    prefix = prepared(source, kind, tokenizer)
    assert line in capsys.readouterr().out
    prepared(source, kind, tokenizer)
    assert "up to date" in (out := capsys.readouterr().out) and line in out
    assert main(["data", "inspect", str(prefix)]) == 0
    assert line in capsys.readouterr().out


def test_columns_beside_the_text_of_a_table_are_named(tmp_path: Path, tokenizer: Tokenizer, capsys) -> None:
    source = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["the tensor", "waits"], "foo": [1, 2]}), source)
    prepared(source, "text", tokenizer)
    assert f"data: keys without effect in {source}: 'foo' in 2 of 2 rows\n" in capsys.readouterr().out


def test_rows_with_nothing_else_are_not_spoken_of(tmp_path: Path, tokenizer: Tokenizer, capsys) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"messages": [ASKED, ANSWERED | {"weight": 1}]}))
    prefix = prepared(source, "instruct", tokenizer)
    assert "data:" not in capsys.readouterr().out
    facts = prepared_facts(prefix)
    assert facts is not None and RowCounts.of_json(facts.counts) == RowCounts(1, 2)


def test_counts_survive_a_kill(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.prepare.encoded_batches._BATCH_CHARACTERS", 1)
    monkeypatch.setattr(prepare, "_JOURNAL_BATCHES", 1)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": f"the tensor {number}", "foo": number}))
    write, calls = prepare.write_journal, []

    def killed(first: Path, entry: dict[str, Any]) -> None:
        write(first, entry)
        calls.append(entry)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "write_journal", killed)
    preparation = Preparation(Corpus.open([str(folder)]), tokenizer, (tmp_path / "prepared",))
    with pytest.raises(KeyboardInterrupt):
        prepare_outputs(preparation)
    monkeypatch.setattr(prepare, "write_journal", write)
    [facts] = prepare_outputs(preparation)
    assert facts.counts["rows"] == 3 and facts.counts["columns"] == {"foo": 3}


def test_a_conversation_of_several_samples_is_spoken_of_and_not_divided(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    template, source = tmp_path / "last.jinja", tmp_path / "rows.jsonl"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{{ m.content if loop.last else m.content[:1] }}|"
        "{% else %}Q:{{ m.content }}|{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    rows = [{"messages": [ASKED, ANSWERED, ASKED, ANSWERED | {"content": f"goes {n}"}]} for n in range(9)]
    source.write_text("\n".join(map(json.dumps, rows)))
    prefix = prepared(
        source, "instruct", tokenizer, "--chat-template", str(template), "--split", "0.5", "0.5"
    )
    out = capsys.readouterr().out
    assert f"so each is a sample behind its own prompt: 9 conversations in {source} became 18 samples" in out
    assert "10 samples, " in out and "8 samples, " in out and "9 conversations," not in out
    parts = [prepared_facts(prefix.with_name(f"prepared-{part}")) for part in ("train", "validation")]
    assert all(facts is not None and facts.documents % 2 == 0 for facts in parts)
    assert sum(facts.documents for facts in parts if facts is not None) == 18


def test_many_keys_stay_one_line() -> None:
    counts = RowCounts(3, 0, 0, Counter({f"k{n}": 1 for n in range(10)}))
    [line] = counts.sentences(["a"])
    assert line.endswith("'k7' in 1, 2 other keys of 3 rows")
    assert list(RowCounts.of_json({}).sentences(["a"])) == []
