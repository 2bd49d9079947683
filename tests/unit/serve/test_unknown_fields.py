"""No field of a request is dropped without a word: it has an effect, is known to have none, or is refused by name."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.serve.unsupported import NO_EFFECT
from tests.support.serving import MODEL, Live, served
from tests.support.tool_templates import HERMES

# Objects whose keys a client chooses.
FREE = {
    "metadata",
    "prediction",
    "schema",
    "parameters",
    "cache_control",
    "logit_bias",
    "parsed",
    "parsed_arguments",
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "x", "parameters": SCHEMA, "strict": True}
CALLED = {"name": "f", "arguments": "{}", "parsed_arguments": {"x": 1}}
CALL = {"id": "123456789", "type": "function", "function": CALLED, "index": 0}
# Fields that change nothing, each with a value that a client may send.
NOTHING: dict[str, Any] = {
    "metadata": {"any": "thing"},
    "prediction": {"type": "content", "content": "One"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": True,
}
COMMON = {
    "model": MODEL,
    "max_tokens": 3,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": True},
    "user": "u",
    "seed": 0,
    **NOTHING,
}
MESSAGES = [
    {
        "role": "system",
        "content": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    },
    {"role": "user", "content": "Hello", "name": "Ann", "type": "text"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL],
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
    },
    {"role": "tool", "content": "1", "tool_call_id": "123456789", "name": "f"},
    {"role": "assistant", "content": "1", "tool_calls": [], "parsed": {"x": 1}},
    {"role": "user", "content": "And now?"},
]
NEUTRAL = {
    "modalities": ["text"],
    "reasoning_effort": "none",
    "verbosity": "medium",
    "logit_bias": {},
    "functions": [],
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "completions",
        {
            **COMMON,
            "prompt": "One",
            "echo": True,
            "best_of": 1,
            "suffix": "",
            "response_format": {"type": "text"},
        },
    ),
    (
        "chat/completions",
        {
            **COMMON,
            **NEUTRAL,
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": True,
        },
    ),
    (
        "chat/completions",
        {
            **COMMON,
            "messages": MESSAGES[:2],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
    ("embeddings", {"model": MODEL, "input": "One", "user": "u"}),
]


def planted(body: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the name of an unknown key in each object of a body, with the place of the object."""
    if isinstance(body, dict):
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
        yield f"{name}.planted".removeprefix("."), place
        for key, value in body.items():
            if key not in FREE:
                yield from planted(value, (*place, key))
    elif isinstance(body, list):
        for index, value in enumerate(body):
            yield from planted(value, (*place, index))


def with_key(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    target = changed
    for key in place:
        target = target[key]
    target["planted"] = value
    return changed


def test_a_planted_key_is_refused_by_its_name(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        names = []
        for path, body in BODIES:
            response = await server.client.post(f"/v1/{path}", json=body)
            if path != "embeddings":  # of which this engine has none
                assert response.status_code == 200, response.text
            for name, place in planted(body):
                for value in ("x", None):
                    response = await server.client.post(f"/v1/{path}", json=with_key(body, place, value))
                    error = response.json()["error"]
                    assert (response.status_code, error["param"], error["code"]) == (
                        400,
                        name,
                        "unknown_field",
                    )
                    assert error["message"].startswith(f"{name}: ")
                names.append(name)
        for part in ("messages[0].content[0]", "messages[2].tool_calls[0].function", "tools[0].function"):
            assert f"{part}.planted" in names
        for part in ("stream_options", "response_format.json_schema", "tool_choice.function", "messages[1]"):
            assert f"{part}.planted" in names

    served(scenario, tmp_path, template=HERMES, context=4000)


def test_fields_without_effect_change_nothing(tmp_path: Path) -> None:
    assert NOTHING.keys() == NO_EFFECT.keys()

    async def scenario(server: Live) -> None:
        for name, value in NOTHING.items():
            assert (await server.complete(**{name: value})).json()["choices"][0]["text"] == "abcd"
            wrong = await server.complete(**{name: 5})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == name

    served(scenario, tmp_path)


def test_the_docs_name_each_field_without_effect() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    [line] = [line for line in docs.split("\n\n") if "have no effect" in line]
    for name in [*NO_EFFECT, "name", "include_obfuscation", "cache_control", "parsed", "parsed_arguments"]:
        assert f"`{name}`" in line, name
