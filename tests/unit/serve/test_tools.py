"""Tools of /v1/chat/completions, over an engine that writes what a test says."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megalite.generation.tool_calls import ToolForm
from megalite.serve.tools import ToolStream, ToolUse
from tests.support.serving import MODEL, Live, served
from tests.support.tool_templates import HERMES
from tests.unit.serve.test_protocol import data_of

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "time", "strict": True}},
]
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS, "seed": 0}
NAMED = {"type": "function", "function": {"name": "weather"}}
OBJECT = '{"name": "weather", "arguments": {"city": "Ulm"}}'
CALL = f"<tool_call>\n{OBJECT}\n</tool_call>"
SECOND = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
HERMES_FORM = ToolForm("<tool_call>\n", "\n", "\n</tool_call>", "name", "arguments", None)
LLAMA_FORM = ToolForm("", None, "", "name", "parameters", None)
LIST_FORM = ToolForm("[", ", ", "]", "name", "arguments", None)  # without a mark
ROOM: dict[str, Any] = {"template": HERMES, "context": 4000}


async def ask(server: Live, script: str, **fields: Any) -> dict[str, Any]:
    """Return the only choice of the answer to a request whose answer is `script`."""
    server.engine.script = script
    response = await server.client.post("/v1/chat/completions", json={**ASKED, **fields})
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice


async def stream(server: Live, script: str, **fields: Any) -> tuple[str, list[dict[str, Any]], list[Any]]:
    """Return the content, the calls and the deltas of the same answer as a stream."""
    server.engine.script = script
    body = {**ASKED, **fields, "stream": True}
    *chunks, done = data_of((await server.client.post("/v1/chat/completions", json=body)).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert done == "[DONE]" and [each["finish_reason"] for each in choices[:-1]] == [None] * (
        len(choices) - 1
    )
    # As OpenAI's service does: the last chunk has the reason alone.
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] is not None
    deltas = [choice["delta"] for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    return "".join(delta.get("content") or "" for delta in deltas), calls, choices


def called(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return name and arguments of calls, whose ids differ."""
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" and len(call["id"]) == 9 for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def prompt(server: Live) -> str:
    """Return the text of the newest prompt."""
    return server.tokenizer.decode(server.engine.requests[-1].prompt_ids)


WEATHER, TIME = ("weather", {"city": "Ulm"}), ("time", {})


def test_calls_of_an_answer(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        for script, content, calls in (
            (CALL, None, [WEATHER]),
            (f"I look.\n{CALL}\n{SECOND}", "I look.", [WEATHER, TIME]),
            (f"\nI look.\n{CALL}\nDone.", "\nI look.\nDone.", [WEATHER]),
        ):
            choice = await ask(server, script)
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == content
            assert called(choice["message"]["tool_calls"]) == calls
            text, streamed, choices = await stream(server, script)
            assert (text or None, called(streamed)) == (content, calls)
            assert [call["index"] for call in streamed] == list(range(len(calls)))
            assert choices[-1]["finish_reason"] == "tool_calls"
        # The template has shown both tools; a tool without parameters has an empty schema there.
        assert '"description": "of a city"' in prompt(server) and prompt(server).count('"parameters": {') == 2
        assert "strict" not in prompt(server)

    served(scenario, tmp_path, **ROOM)


@pytest.mark.parametrize("script", ["No rain.", "<tool_call> is a mark", CALL.replace("weather", "other")])
def test_an_answer_without_calls_is_text(tmp_path: Path, script: str) -> None:
    async def scenario(server: Live) -> None:
        choice = await ask(server, script)
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == script
        assert "tool_calls" not in choice["message"]
        text, calls, choices = await stream(server, script)
        assert (text, calls, choices[-1]["finish_reason"]) == (script, [], "stop")

    served(scenario, tmp_path, **ROOM)


def test_content_is_streamed_before_the_calls(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        _, _, choices = await stream(server, f"Wait < 5.\n{CALL}")
        shown = [choice["delta"].get("content") for choice in choices if choice["delta"].get("content")]
        assert len(shown) > 5 and "".join(shown) == "Wait < 5."

    served(scenario, tmp_path, **ROOM)


def test_a_cut_call_is_text_and_ends_by_its_length(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        choice = await ask(server, CALL, max_tokens=20)
        assert choice["finish_reason"] == "length" and choice["message"]["content"] == CALL[:20]
        whole = await ask(server, f"{CALL}\n{SECOND}", max_tokens=len(CALL) + 20)
        assert whole["finish_reason"] == "length" and called(whole["message"]["tool_calls"]) == [WEATHER]
        assert whole["message"]["content"] == SECOND[:19]

    served(scenario, tmp_path, **ROOM)


def test_choices_of_a_tool(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        for choice, finish, schemas in (("required", "tool_calls", 2), (NAMED, "stop", 1)):
            for message, reason in (
                ((each := await ask(server, OBJECT, tool_choice=choice))["message"], each["finish_reason"]),
                (
                    {"tool_calls": (s := await stream(server, OBJECT, tool_choice=choice))[1]},
                    s[2][-1]["finish_reason"],
                ),
            ):
                assert called(message["tool_calls"]) == [WEATHER] and reason == finish
                request = server.engine.requests[-1]
                assert request.json_schema is not None
                schema = json.loads(request.json_schema)
                kinds = schema.get("anyOf", [schema])
                assert len(kinds) == schemas and kinds[0]["properties"]["name"] == {"const": "weather"}
                assert kinds[0]["properties"]["arguments"] == PARAMETERS
                # The prompt ends with the beginning of a call.
                assert prompt(server).endswith("assistant\n<tool_call>\n")
        none = await ask(server, CALL, tool_choice="none")
        assert none["message"]["content"] == CALL and none["finish_reason"] == "stop"
        assert "weather" not in prompt(server) and server.engine.requests[-1].json_schema is None
        single = await ask(server, f"{CALL}\n{SECOND}", parallel_tool_calls=False)
        assert called(single["message"]["tool_calls"]) == [WEATHER]

    served(scenario, tmp_path, **ROOM)


def test_a_conversation_with_calls_and_results(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        first = await ask(server, CALL)
        call = first["message"]["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sun", "name": "weather"}
        # The message of an answer is sent back as it came.
        talk = [*ASKED["messages"], first["message"], result]
        choice = await ask(server, "Sun.", messages=talk)
        assert choice["message"]["content"] == "Sun."
        assert f"assistant\n\n{CALL}<|im_end|>" in prompt(server)
        assert "<tool_response>\nsun\n</tool_response>" in prompt(server)
        # Tools need not come again.
        bare = {"model": MODEL, "messages": talk}
        assert (await server.client.post("/v1/chat/completions", json=bare)).status_code == 200
        call["function"]["arguments"] = "[1]"
        wrong = await server.client.post("/v1/chat/completions", json={**bare, "messages": talk})
        error = wrong.json()["error"]
        assert error["param"] == "messages[1].tool_calls[0].function.arguments", error

    served(scenario, tmp_path, **ROOM)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("stop", {"stop": "}", "tool_choice": "required"}),
    (
        "tools",
        {
            "tool_choice": "required",
            "tools": [{**TOOLS[0], "function": {"name": "x", "parameters": {"not": {}}}}],
        },
    ),
]


def test_what_tools_do_not_go_with(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        for param, fields in REFUSED:
            response = await server.client.post("/v1/chat/completions", json={**ASKED, **fields})
            assert response.status_code == 400 and response.json()["error"]["param"] == param

    served(scenario, tmp_path, **ROOM)


def test_without_tools_in_the_template_one_sentence_says_so(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    talk = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("tools", {}),
        ("messages[0]", {"tools": [], "messages": talk}),
        ("messages[1]", {"tools": [], "messages": [*ASKED["messages"], {"role": "tool", "content": "sun"}]}),
    ]

    async def scenario(server: Live) -> None:
        for param, fields in asked:
            response = await server.client.post("/v1/chat/completions", json={**ASKED, **fields})
            error = response.json()["error"]
            assert response.status_code == 400 and (error["code"], error["param"]) == ("unsupported", param)
            assert "chat template has no tools" in error["message"] and "--chat-template" in error["message"]
        # Tools that may not be called ask for nothing.
        response = await server.client.post("/v1/chat/completions", json={**ASKED, "tool_choice": "none"})
        assert response.status_code == 200

    served(scenario, tmp_path)


BEFORE = ("", "I look.", "\n\nI look. ", " \n", "a < b <tool")
BEHIND = ("", "\nDone.", f"\n{SECOND}", f" and {SECOND} now \n", " <tool_call> is a mark")
BARE = OBJECT.replace("arguments", "parameters")
ANSWERS = [
    *((HERMES_FORM, before + CALL + behind) for before in BEFORE for behind in BEHIND),
    *((HERMES_FORM, before + "<tool_call>no call" + behind) for before in BEFORE for behind in BEHIND),
    *((LLAMA_FORM, before + BARE + behind) for before in BEFORE for behind in BEHIND),
    *((LIST_FORM, f"{before}{text}") for before in BEFORE for text in (OBJECT, f" [{OBJECT}] x", "[1]")),
]


@pytest.mark.parametrize(("form", "answer"), ANSWERS)
def test_a_stream_has_the_content_of_the_whole_however_it_is_cut(form: ToolForm, answer: str) -> None:
    use = ToolUse(form, frozenset({"weather", "time"}))
    content, calls = use.divide(answer)
    cuts = [(end,) for end in range(len(answer) + 1)] + [tuple(range(0, len(answer), n)) for n in (1, 2, 5)]
    for places in cuts:
        stream = ToolStream(use)
        bounds = [0, *places, len(answer)]
        parts = [answer[start:end] for start, end in pairwise(bounds)]
        shown = [stream.push(part, ends=False) for part in parts] + [stream.push("", ends=True)]
        assert "".join(text for text, _ in shown) == content, places
        found = [call["function"] for _, part in shown for call in part]
        assert found == [call["function"] for call in calls]
