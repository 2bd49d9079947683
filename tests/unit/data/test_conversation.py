"""Conversations from rows of each form, and what is said of rows that are none."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megalite.data.conversation import conversation, form_of
from megalite.data.conversation_corpus import ConversationCorpus, ConversationPiece
from megalite.errors import DataError

WHERE = "talks.jsonl, line 3"
ASKED = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}


def messages_of(row: dict[str, Any]) -> list[Any]:
    return list(conversation(row, form_of(row, WHERE), WHERE).messages)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": ASKED}, ASKED),
        ({"messages": [SYSTEM, *ASKED, *ASKED], "id": 4}, [SYSTEM, *ASKED, *ASKED]),
        ({"prompt": "Why?", "completion": "Because."}, ASKED),
        ({"prompt": "Why?", "response": "Because."}, ASKED),
        ({"instruction": "Why?", "response": "Because."}, ASKED),
        ({"question": "Why?", "answer": "Because.", "system": "Be brief."}, [SYSTEM, *ASKED]),
        ({"prompt": ASKED[:1], "completion": ASKED[1:]}, ASKED),
        ({"instruction": "Why?", "output": "Because."}, ASKED),
        ({"instruction": "Why?", "input": " ", "output": "Because.", "system": ""}, ASKED),
        (
            {"instruction": "Add.", "input": "1 and 2", "output": "3"},
            [{"role": "user", "content": "Add.\n\n1 and 2"}, {"role": "assistant", "content": "3"}],
        ),
        ({"instruction": "Why?", "instances": [{"input": "", "output": "Because."}, {"output": "2"}]}, ASKED),
        (
            {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
            ASKED,
        ),
        (
            {
                "conversations": [{"from": "user", "value": "Why?"}, {"from": "model", "value": "Because."}],
                "system": "Be brief.",
            },
            [SYSTEM, *ASKED],
        ),
        ({"conversations": ASKED}, ASKED),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}],
                    },
                    *ASKED[1:],
                ]
            },
            ASKED,
        ),
        # A table has every key in every message.
        ({"messages": [{**each, "tool_calls": None} for each in ASKED]}, ASKED),
        (
            {"messages": [ASKED[0], CALL, {"role": "tool", "content": ""}, ASKED[1]]},
            [ASKED[0], {**CALL, "content": ""}, {"role": "tool", "content": ""}, ASKED[1]],
        ),
    ],
)
def test_the_forms(row: dict[str, Any], messages: list[Any]) -> None:
    assert messages_of(row) == messages


def test_tools_are_a_list_or_its_json() -> None:
    tools = [{"name": "add"}]
    for given in (tools, json.dumps(tools)):
        assert conversation({"messages": ASKED, "tools": given}, "messages", WHERE).tools == tuple(tools)
    for nothing in (None, "", []):
        assert conversation({"messages": ASKED, "tools": nothing}, "messages", WHERE).tools is None
    with pytest.raises(DataError, match=f"^{WHERE}: tools is not JSON"):
        conversation({"messages": ASKED, "tools": "[add"}, "messages", WHERE)
    with pytest.raises(DataError, match=f"^{WHERE}: tools is not a list of objects"):
        conversation({"messages": ASKED, "tools": ["add"]}, "messages", WHERE)


def turn(role: Any, content: Any) -> dict[str, Any]:
    return {"messages": [ASKED[0], {"role": role, "content": content}, *ASKED]}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "a"}, r"no conversation in the columns \['text'\]; rename them to one of these: messages; prompt"),
        ({"messages": []}, "no message of the assistant"),
        ({"messages": ASKED[:1]}, "no message of the assistant"),
        ({"messages": "Why?"}, "messages is str, not a list"),
        ({"messages": ["Why?"]}, r"messages\[0\] is str, not an object"),
        ({"messages": [{"content": "Why?"}]}, r"messages\[0\].role is missing; write one of system, developer, user"),
        (turn("bot", "x"), r"messages\[1\].role is 'bot'; write one of"),
        (turn("assistant", None), r"messages\[1\].content is missing"),
        (turn("assistant", 4), r"messages\[1\].content is int, not text"),
        (turn("assistant", " \n"), r"messages\[1\].content: the answer of the assistant is empty"),
        (turn("user", ""), r"messages\[1\].content: the prompt of the user is empty"),
        (turn("system", "Be brief."), r"messages\[1\].role is 'system' after other messages"),
        (turn("user", [{"type": "image", "url": "x"}]), r"messages\[1\].content\[0\] is not a text"),
        (turn("user", [{"type": "text"}]), r"messages\[1\].content\[0\].text is missing"),
        ({"prompt": "Why?", "completion": "  "}, r"messages\[1\].content: the answer of the assistant is empty"),
        ({"prompt": "Why?", "completion": ASKED[1:]}, "prompt and completion are not both texts or both lists"),
        ({"instruction": "Why?", "output": 3}, "output is int, not text"),
        ({"instruction": "Why?", "instances": []}, "instances is empty"),
        ({"instruction": "Why?", "instances": [{"input": ""}]}, "output is missing"),
        ({"conversations": [{"from": "me", "value": "x"}]}, r"conversations\[0\].from is 'me', not one of system"),
        ({"conversations": [{"from": "gpt"}]}, r"conversations\[0\].value is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=f"^{WHERE}: {problem}"):
        messages_of(row)


def corpus(source: Path) -> list[Any]:
    """The conversations of a source, and their places."""
    pieces = [piece for piece, _ in ConversationCorpus.open([str(source)]).pieces()]
    assert all(isinstance(piece, ConversationPiece) for piece in pieces)
    return [piece.conversation for piece in pieces]  # type: ignore[attr-defined]


ROWS = [{"messages": [SYSTEM, *ASKED]}, {"messages": ASKED}]


def written(folder: Path, kind: str) -> Path:
    file = folder / f"talks.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    match kind:
        case "jsonl":
            file.write_text(f"\n{lines}")
        case "jsonl.gz":
            file.write_bytes(gzip.compress(lines.encode()))
        case "json":
            file.write_text(json.dumps(ROWS))
        case "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
        case "arrow":
            table = pyarrow.Table.from_pylist(ROWS)
            with pyarrow.ipc.new_stream(str(file), table.schema) as stream:
                stream.write_table(table)
    return file


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("jsonl", ["line 2", "line 3"]),
        ("jsonl.gz", ["line 1", "line 2"]),
        ("json", ["row 0", "row 1"]),
        ("parquet", ["row 0", "row 1"]),
        ("arrow", ["row 0", "row 1"]),
    ],
)
def test_every_kind_of_file(tmp_path: Path, kind: str, places: list[str]) -> None:
    file = written(tmp_path, kind)
    found = corpus(file)
    assert [list(each.messages) for each in found] == [row["messages"] for row in ROWS]
    assert [each.where for each in found] == [f"{file}, {place}" for place in places]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", "Why?", r"a.txt holds no conversations: .*data.kind = \"text\""),
        ("a.json", "{}", "a.json is not a list of objects"),
        ("a.json", '[{"prompt": 1]', "a.json, line 1: not JSON"),
        ("a.json", "[3]", "a.json, row 0: int, not an object"),
        ("a.jsonl", "[]", "a.jsonl, line 1: list, not an object"),
        ("a.jsonl", '{"prompt": ', "a.jsonl, line 1: not JSON"),
        ("a.jsonl", '{"prompt": "\\ud800", "completion": "b"}', "a.jsonl, line 1: half a surrogate pair"),
        ("a.parquet", "PAR1", "a.parquet is not a whole parquet file"),
        (
            "a.jsonl",
            '{"prompt": "a", "completion": "b"}\n{"instruction": "a", "output": "b"}',
            r"a.jsonl, line 2: mixed forms: .* form prompt_completion, .*\['instruction', 'output'\]",
        ),
    ],
)
def test_files_that_cannot_be_read_say_why(tmp_path: Path, name: str, content: str, problem: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=problem):
        corpus(tmp_path / name)


def test_files_end_where_they_were_cut(tmp_path: Path) -> None:
    file = written(tmp_path, "jsonl.gz")
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(DataError, match="is not a whole gzip file"):
        corpus(file)
    file = written(tmp_path, "parquet")
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(DataError, match="is not a whole parquet file"):
        corpus(file)


@pytest.mark.parametrize(("name", "count"), [("gsm8k/test.jsonl", 1319), ("instruct/seed_tasks.jsonl", 175)])
def test_real_data_are_conversations(shared_data: Path, name: str, count: int) -> None:
    found = corpus(shared_data / name)
    assert len(found) == count
    assert all([message["role"] for message in each.messages] == ["user", "assistant"] for each in found)
