"""Rows of instruction data as conversations: each form, each file type, real data, and what is said about bad rows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megalite.data.chat.conversation import Conversation, conversation, form_of
from megalite.data.text.records import records
from megalite.data.text.source_files import source_files
from megalite.errors import DataError
from tests.support.museum import exhibit
from tests.support.planted import Planted
from tests.unit.data.text.test_records import TABLES, write

Row = dict[str, Any]
WHERE = "a.jsonl, line 3"
ASKED = {"role": "user", "content": "2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4"}
TERSE = {"role": "system", "content": "Be terse."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4", "name": "add"}
TOOL = {"type": "function", "function": {"name": "add"}}


def converted(row: Row, *, source: Row | None = None) -> Conversation:
    """The row as a conversation, in the form of the first row of its source."""
    return conversation(row, form_of(row if source is None else source, WHERE), WHERE)


def read(path: Path) -> list[Conversation]:
    form, found = None, []
    for file in source_files(str(path), "*", "data.train"):
        for row, where, _ in records(file):
            form = form or form_of(row, where)
            found.append(conversation(row, form, where))
    return found


def text(content: str) -> Row:
    return {"type": "text", "text": content}


FORMS: list[tuple[str, Row, list[Row]]] = [
    ("messages", {"messages": [ASKED, ANSWERED]}, [ASKED, ANSWERED]),
    ("messages", {"messages": [TERSE, ASKED, ANSWERED], "prompt": "2 + 2?"}, [TERSE, ASKED, ANSWERED]),
    ("messages", {"conversations": [ASKED, ANSWERED]}, [ASKED, ANSWERED]),
    ("messages", {"messages": [ASKED, ANSWERED], "system": "Be terse."}, [TERSE, ASKED, ANSWERED]),
    ("messages", {"messages": [ASKED, CALLING, RESULT, ANSWERED]}, [ASKED, CALLING, RESULT, ANSWERED]),
    ("messages", {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]}]}, [ASKED, CALLING]),
    (
        "messages",
        {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
        [ASKED, CALLING | {"content": ""}],
    ),
    (
        "messages",
        {"messages": [ASKED | {"name": None, "tool_calls": None}, ANSWERED | {"tool_calls": []}]},
        [ASKED, ANSWERED],
    ),
    (
        "messages",
        {"messages": [{"role": "developer", "content": "x"}, ASKED, ANSWERED | {"reasoning": "easy"}]},
        [{"role": "developer", "content": "x"}, ASKED, ANSWERED | {"reasoning": "easy"}],
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": [text("2 +"), text(" 2?") | {"image": None}]}, ANSWERED]},
        [ASKED, ANSWERED],
    ),
    ("prompt_completion", {"prompt": "2 + 2?", "completion": "4"}, [ASKED, ANSWERED]),
    ("prompt_completion", {"question": "2 + 2?", "answer": "4", "id": 7}, [ASKED, ANSWERED]),
    ("prompt_completion", {"prompt": "2 + 2?", "response": "4"}, [ASKED, ANSWERED]),
    ("prompt_completion", {"instruction": "2 + 2?", "response": "4", "context": ""}, [ASKED, ANSWERED]),
    (
        "prompt_completion",
        {"instruction": "Add.", "response": "4", "context": "2, 2"},
        [{"role": "user", "content": "Add.\n\n2, 2"}, ANSWERED],
    ),
    (
        "prompt_completion",
        {"question": "Sum?", "answer": "4", "context": "2, 2"},
        [{"role": "user", "content": "Sum?\n\n2, 2"}, ANSWERED],
    ),
    ("prompt_completion", {"prompt": "2 + 2?", "completion": "4", "input": "no part"}, [ASKED, ANSWERED]),
    ("prompt_completion", {"prompt": [TERSE, ASKED], "completion": [ANSWERED]}, [TERSE, ASKED, ANSWERED]),
    ("alpaca", {"instruction": "2 + 2?", "output": "4"}, [ASKED, ANSWERED]),
    ("alpaca", {"instruction": "2 + 2?", "input": " ", "output": "4", "system": None}, [ASKED, ANSWERED]),
    (
        "alpaca",
        {"instruction": "Add.", "input": "2, 2", "output": "4", "system": "Be terse."},
        [TERSE, {"role": "user", "content": "Add.\n\n2, 2"}, ANSWERED],
    ),
    ("alpaca", {"instruction": "", "input": "2 + 2?", "output": "4"}, [ASKED, ANSWERED]),
    (
        "alpaca",
        {
            "instruction": "Add.",
            "instances": [{"input": "2, 2", "output": "4"}, {"input": "1", "output": ""}],
        },
        [{"role": "user", "content": "Add.\n\n2, 2"}, ANSWERED],
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        [ASKED, ANSWERED],
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "user", "value": "2 + 2?"}, {"from": "bard", "value": "4", "role": "x"}]},
        [ASKED, ANSWERED],
    ),
    (
        "sharegpt",
        {
            "system": "Be terse.",
            "conversations": [
                {"from": "human", "value": "2 + 2?"},
                {"from": "observation", "value": "4", "name": "add"},
                {"from": "model", "value": "4"},
            ],
        },
        [TERSE, ASKED, RESULT, ANSWERED],
    ),
]


@pytest.mark.parametrize(("form", "row", "messages"), FORMS)
def test_a_row_of_each_form(form: str, row: Row, messages: list[Row]) -> None:
    before = json.dumps(row)
    assert form_of(row, WHERE) == form
    prompt = len(row["prompt"]) if isinstance(row.get("prompt"), list) else 0
    assert converted(row) == Conversation(tuple(messages), WHERE, prompt=prompt)
    assert json.dumps(row) == before


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", *TABLES])
@pytest.mark.parametrize("form", ["messages", "sharegpt", "prompt_completion", "alpaca"])
def test_each_form_from_each_type_of_file(tmp_path: Path, name: str, form: str) -> None:
    row, messages = next((row, messages) for each, row, messages in FORMS if each == form)
    first = 1 if name == "x.jsonl" else 0
    path = write(tmp_path / name, [row, row])
    place = "line" if first else "row"
    expected = [Conversation(tuple(messages), f"{path}, {place} {number}") for number in (first, first + 1)]
    assert read(path) == expected


@pytest.mark.parametrize("name", ["x.jsonl", *TABLES])
def test_messages_of_unlike_fields_stay_so_in_a_table(tmp_path: Path, name: str) -> None:
    messages = [ASKED, CALLING, RESULT, ANSWERED]
    other = [ASKED, ANSWERED | {"thinking": "easy"}]
    path = write(
        tmp_path / name, [{"messages": messages, "tools": [TOOL]}, {"messages": other, "tools": None}]
    )
    first, second = read(path)
    assert (first.messages, first.tools) == (tuple(messages), (TOOL,))
    assert (second.messages, second.tools) == (tuple(other), None)


@pytest.mark.parametrize(
    ("tools", "expected"),
    [([TOOL], (TOOL,)), (json.dumps([TOOL]), (TOOL,)), ([], None), ("[]", None), ("", None), (None, None)],
)
def test_tools_are_a_list_or_its_json(tools: Any, expected: Any) -> None:
    assert converted({"messages": [ASKED, ANSWERED], "tools": tools}).tools == expected


SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function"), "tool"),
}


@pytest.mark.parametrize("named", SHAREGPT_ROLES)
def test_the_roles_of_sharegpt(named: str) -> None:
    turns = [{"from": named, "value": "a"}, {"from": "gpt", "value": "b"}]
    assert converted({"conversations": turns}).messages[0] == {"role": SHAREGPT_ROLES[named], "content": "a"}


def after(*messages: Any) -> Row:
    return {"messages": [ASKED, ANSWERED, *messages]}


ROLES = "system, developer, user, assistant, tool"
ERRORS: list[tuple[Row, str]] = [
    (after("hello"), "messages[2] is text, not a message; write an object with role and content"),
    (after(None), "messages[2] is null, not a message"),
    (after({"content": "a"}), f"messages[2].role is missing; set it to one of {ROLES}"),
    (
        after({"role": "bot", "content": "a"}),
        f"messages[2].role is 'bot', an unknown role; set it to one of {ROLES}",
    ),
    (after({"role": ["user"], "content": "a"}), "messages[2].role is ['user'], an unknown role"),
    (after({"role": "user"}), "messages[2].content is missing or null; write its text, or remove the row"),
    (after({"role": "assistant", "content": None}), "messages[2].content is missing or null"),
    (after({"role": "user", "tool_calls": [CALL]}), "messages[2].content is missing or null"),
    (after({"role": "user", "content": 5}), "messages[2].content is a number, not text; write it as text"),
    (after({"role": "user", "content": {"a": 1}}), "messages[2].content is an object, not text"),
    (after(CALLING | {"content": 5}), "messages[2].content is a number, not text"),
    (after({"role": "user", "content": " \n"}), "messages[2].content is an empty prompt; write its text"),
    (after({"role": "user", "content": []}), "messages[2].content is an empty prompt"),
    (
        after({"role": "assistant", "content": " \n"}),
        "messages[2].content is an empty answer; write its text",
    ),
    (after({"role": "assistant", "content": "", "tool_calls": []}), "messages[2].content is an empty answer"),
    (
        after({"role": "assistant", "tool_calls": "f()"}),
        "messages[2].tool_calls is text, not a list; write a list",
    ),
    (
        after({"role": "user", "content": ["a"]}),
        "messages[2].content[0] is text, not a part of a content; write {",
    ),
    (
        after({"role": "user", "content": [text("a"), {"type": "image"}]}),
        "messages[2].content[1].type is 'image', but only text is read; remove the part or the row",
    ),
    (
        after({"role": "user", "content": [{"type": "text"}]}),
        "messages[2].content[0].text is missing or null",
    ),
    (after(TERSE), "messages[2] is a system message after another message; put it first, or remove it"),
    (
        {"messages": [TERSE, ASKED, ANSWERED], "system": "Be kind."},
        "messages[0] is a system message after another message",
    ),
    ({"messages": []}, "messages has no messages; add them, or remove the row"),
    (
        {"messages": None},
        "messages is null, not a list of messages; write a list of objects with role and content",
    ),
    ({"messages": "[]"}, "messages is text, not a list of messages"),
    (
        {"messages": [TERSE, ASKED]},
        "messages has no assistant message, so it teaches nothing; add the answer",
    ),
    ({"messages": [ASKED, ANSWERED], "system": 1}, "system is a number, not text; write it as text"),
    (after() | {"tools": "{"}, "tools is not JSON (Expecting property name"),
    (after() | {"tools": '{"a": 1}'}, "tools is an object, not a list; write a list of tools, or remove"),
    (after() | {"tools": ["f"]}, "tools[0] is text, not an object; write each tool as an object"),
    (after() | {"tools": '[{"a": "\\ud800"}]'}, "tools[0].a: half a surrogate pair at character 0"),
    ({"prompt": "a", "completion": None}, "completion is missing or null; write its text, or remove the row"),
    ({"prompt": None, "completion": "b"}, "prompt is missing or null"),
    ({"prompt": " ", "completion": "b"}, "prompt is an empty prompt"),
    ({"question": "a", "answer": "\n"}, "answer is an empty answer"),
    ({"question": "a", "answer": 4}, "answer is a number, not text"),
    (
        {"prompt": [ASKED], "completion": "4"},
        "prompt is a list of messages, but completion is text; make both texts, or both lists",
    ),
    ({"prompt": None, "completion": [ANSWERED]}, "completion is a list of messages, but prompt is null"),
    ({"prompt": [], "completion": [ANSWERED]}, "prompt has no messages"),
    ({"prompt": [ASKED, ANSWERED], "completion": [ASKED]}, "completion has no assistant message"),
    ({"prompt": [ASKED], "completion": [{"content": "a"}]}, "completion[0].role is missing"),
    ({"question": "a", "answer": "b", "context": {"x": 1}}, "context is an object, not text"),
    ({"instruction": "", "input": "", "output": "a"}, "instruction is an empty prompt"),
    ({"instruction": "a", "input": ["x"], "output": "a"}, "input is a list, not text"),
    ({"instruction": "a", "input": None, "output": " "}, "output is an empty answer"),
    ({"instruction": "a", "instances": []}, "instances is not a list of objects with input and output"),
    (
        {"instruction": "a", "instances": [{"input": 1, "output": "b"}]},
        "instances[0].input is a number, not text",
    ),
    ({"instruction": "a", "instances": [{"input": ""}]}, "instances[0].output is missing or null"),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "Bot", "value": "b"}]},
        "conversations[1].from is 'Bot', an unknown role; set it to one of system, human, user, gpt, assistant, ",
    ),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]},
        "conversations[1].value is an empty answer",
    ),
    ({"conversations": [{"from": "human"}]}, "conversations[0].value is missing or null"),
    ({"conversations": None}, "conversations is null, not a list of messages"),
]


@exhibit(
    "axolotl PR#3739",
    also=("axolotl PR#3751", "LlamaFactory PR#10291", "LlamaFactory PR#10455"),
    subject="conversations",
    there="a row with a null or empty content, or with messages that are no list, ended preparation with a traceback",
    here="the file, the line and the field are named, with a remedy",
    fault=Planted(
        "megalite.data.chat.messages:message_text",
        lambda check: lambda *read: None,
        seen_as=(AttributeError,),
    ),
    case="row6-",
)
@pytest.mark.parametrize(("row", "said"), ERRORS)
def test_bad_rows_are_named_with_place_field_and_remedy(row: Row, said: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(f'{WHERE}: {said}')}") as raised:
        converted(row)
    assert "; " in str(raised.value)


@pytest.mark.parametrize(
    ("name", "place"), [("x.jsonl", "line 2"), ("x.json", "row 1"), ("x.parquet", "row 1")]
)
def test_a_bad_row_is_found_in_its_file(tmp_path: Path, name: str, place: str) -> None:
    rows = [{"messages": [ASKED, ANSWERED]}, {"messages": [ASKED, {"role": "assistant", "name": "x"}]}]
    with pytest.raises(
        DataError, match=rf"/{name}, {place}: messages\[1\]\.content is missing or null; write"
    ):
        read(write(tmp_path / name, rows))


def test_unknown_columns_are_listed_with_those_of_the_forms() -> None:
    with pytest.raises(DataError) as raised:
        form_of({"text": "a", "input": "b"}, WHERE)
    assert str(raised.value) == (
        "a.jsonl, line 3: no form of instruction data has the columns ['input', 'text'] "
        "(messages: messages or conversations; sharegpt: conversations; prompt_completion: prompt + completion or "
        "question + answer or prompt + response or instruction + response; alpaca: instruction + output or "
        'instruction + instances); rename the columns, or read plain text with data.kind = "text"'
    )


@pytest.mark.parametrize(
    ("source", "row", "said"),
    [
        ({"prompt": "a", "completion": "b"}, {"messages": []}, "['messages'], the form 'messages'"),
        ({"messages": []}, {"prompt": "a"}, "['prompt']"),
        (
            {"conversations": [{"from": "human", "value": "a"}]},
            {"conversations": [ASKED]},
            "['conversations'], the form 'messages'",
        ),
        (
            {"conversations": [ASKED]},
            {"conversations": [{"from": "human", "value": "a"}]},
            "['conversations'], the form 'sharegpt'",
        ),
        ({"instruction": "a", "output": "b"}, {"instruction": "a"}, "['instruction']"),
    ],
)
def test_a_row_of_another_form_is_refused(source: Row, row: Row, said: str) -> None:
    start = f"{WHERE}: mixed forms: the form of the source is {form_of(source, WHERE)!r}, by its first row, "
    with pytest.raises(
        DataError,
        match=f"^{re.escape(start + f'but this row has the columns {said}; give all rows one form')}$",
    ):
        converted(row, source=source)


@pytest.mark.parametrize(
    "turns", [[], [{"value": "a"}], [{"from": None, "value": "a"}]], ids=["none", "no from", "null from"]
)
def test_a_conversation_without_roles_is_no_other_form(turns: list[Row]) -> None:
    with pytest.raises(DataError, match=r"conversations has no messages|conversations\[0\]\.from is missing"):
        converted({"conversations": turns}, source={"conversations": [{"from": "human", "value": "a"}]})


def test_gsm8k_is_a_question_and_an_answer_each(shared_data: Path) -> None:
    path = shared_data / "gsm8k" / "train.jsonl"
    rows = [json.loads(line) for line in path.open()]
    assert [[message["content"] for message in each.messages] for each in read(path)] == [
        [row["question"], row["answer"]] for row in rows
    ]
    assert len(rows) == 7473


def test_the_seed_tasks_of_self_instruct(shared_data: Path) -> None:
    found = read(shared_data / "instruct" / "seed_tasks.jsonl")
    assert len(found) == 175
    assert {tuple(message["role"] for message in each.messages) for each in found} == {("user", "assistant")}
    assert found[1].messages[0]["content"] == (
        "What is the relation between the given pairs?\n\nNight : Day :: Right : Left"
    )
    assert found[0].messages[0]["content"].endswith("1000 calories?")


def test_answers_in_a_list_of_the_prompt_are_its_own() -> None:
    asked = {"role": "user", "content": "2 + 2?"}
    answered = {"role": "assistant", "content": "4"}
    row = {"system": "Be terse.", "prompt": [asked, answered, asked], "completion": [answered]}
    found = converted(row)
    assert found.prompt == 4 and [each["role"] for each in found.messages[4:]] == ["assistant"]


SAYING = [
    ({"weight": 0}, False),
    ({"weight": 1.0}, True),
    ({"train": False}, False),
    ({"training": True}, True),
    ({"loss": False, "masked": True}, False),
    ({"weight": None, "train_detail": []}, None),
]


@pytest.mark.parametrize(("said", "trained"), SAYING)
def test_what_a_message_says_about_its_training_is_read_and_kept_from_the_template(
    said: Row, trained: bool | None
) -> None:
    marks = {} if trained is None else {2: trained}
    sharegpt = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"} | said]
    for row in (
        {"messages": [ASKED, ANSWERED | said], "system": "Be terse."},
        {"conversations": sharegpt, "system": "Be terse."},
        {"prompt": [TERSE, ASKED], "completion": [ANSWERED | said]},
    ):
        found = converted(row)
        assert found.messages == (TERSE, ASKED, ANSWERED) and found.marks == marks


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"weight": 0.5}, "messages[1].weight is 0.5, neither 0 nor 1"),
        ({"weight": True}, "messages[1].weight is true, neither 0 nor 1"),
        ({"weight": "0"}, 'messages[1].weight is "0", neither 0 nor 1'),
        ({"train": 0}, "messages[1].train is 0, neither true nor false"),
        ({"train": "no"}, 'messages[1].train is "no", neither true nor false'),
        ({"loss": [0]}, "messages[1].loss is [0], neither true nor false"),
        ({"weight": 1, "train": False}, "messages[1]: weight and train contradict each other"),
        ({"train_detail": [{"begin_offset": 0}]}, "messages[1].train_detail trains parts of a message"),
    ],
)
def test_what_says_neither_yes_nor_no_is_refused(said: Row, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"{WHERE}: {message}")):
        converted({"messages": [ASKED, ANSWERED | said]})


@pytest.mark.parametrize("said", [{"weight": 0}, {"train": False}, {"masked": True}])
def test_a_row_that_says_not_to_train_on_it_is_refused(said: Row) -> None:
    for row in ({"messages": [ASKED, ANSWERED]}, {"prompt": "a", "completion": "b"}):
        with pytest.raises(DataError, match=f"{WHERE}: {next(iter(said))} is .*remove the row"):
            converted(row | said)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWERED]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b"},
        {"question": "a", "answer": "b", "context": "c", "system": "d"},
        {"instruction": "a", "output": "b", "input": "c", "tools": [TOOL]},
        {"instruction": "a", "instances": [{"input": "c", "output": "b"}]},
    ],
)
def test_columns_that_a_form_does_not_read_are_named(row: Row) -> None:
    assert converted(row).unused == ()
    assert converted(row | {"foo": 1, "none": None, "weight": 1}).unused == ("foo", "weight")


def test_parts_that_are_not_read_are_named() -> None:
    part = text("2 + 2?") | {"cache_control": {"type": "ephemeral"}}
    assert converted({"messages": [ASKED | {"content": [part]}, ANSWERED]}).unused == (
        "content[].cache_control",
    )
    instances = [{"input": "c", "output": "b", "id": 1}, {"input": "d", "output": "e"}]
    found = converted({"instruction": "a", "instances": instances})
    assert found.unused == ("instances[].id", "instances[1]")
