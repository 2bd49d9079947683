"""Requests that are wrong: each gets the right status in OpenAI's error shape, and costs the others nothing."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.serving import CONTEXT, MODEL, REFUSED_TOKENS, Live, served

COMPLETIONS, CHAT, BATCH = "/v1/completions", "/v1/chat/completions", "/batch_generate"
HELLO = [{"role": "user", "content": "Hello"}]
MAX_BODY, MAX_TOKENS = 20_000, 100


@dataclass(frozen=True)
class Wrong:
    """A request with the status, the field and the code of its error. body: JSON as bytes, or the fields of it."""

    status: int
    param: str | None
    code: str
    body: bytes | dict[str, Any] = b""
    path: str = COMPLETIONS
    method: str = "POST"
    kind: str = "application/json"


def completion(status: int, param: str | None, code: str, **fields: Any) -> Wrong:
    return Wrong(status, param, code, {"model": MODEL, "prompt": "One", **fields})


def embedding(status: int, param: str | None, code: str, **fields: Any) -> Wrong:
    return Wrong(status, param, code, {"model": MODEL, **fields}, "/v1/embeddings")


def chat(status: int, param: str | None, code: str, **fields: Any) -> Wrong:
    return Wrong(status, param, code, {"model": MODEL, "messages": HELLO, **fields}, CHAT)


def schema_format(schema: Any = None, name: str = "form") -> dict[str, Any]:
    """Return a response_format; schema: None: it is missing."""
    return {
        "type": "json_schema",
        "json_schema": {"name": name} | ({} if schema is None else {"schema": schema}),
    }


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
NESTED: dict[str, Any] = {}
for _ in range(70):
    NESTED = {"items": NESTED}

WRONG = [
    # Not a JSON object.
    Wrong(400, None, "invalid_json", b""),
    Wrong(400, None, "invalid_json", b"{"),
    Wrong(400, None, "invalid_json", b"\xff\xfe"),
    Wrong(400, None, "invalid_json", b'["prompt"]'),
    Wrong(400, None, "invalid_json", b"null"),
    Wrong(400, None, "invalid_json", b'{"model": "letters", "prompt": "x", "temperature": NaN}'),
    Wrong(400, None, "invalid_json", b'{"model": "letters", "prompt": "\\ud800"}'),
    Wrong(400, None, "invalid_json", b"[" * 15_000),
    Wrong(400, None, "invalid_json", b'{"seed": ' + b"9" * 5_000 + b"}"),
    # Not a completion.
    Wrong(400, "model", "missing_field", {"prompt": "One"}),
    Wrong(400, "prompt", "missing_field", {"model": MODEL}),
    completion(404, "model", "model_not_found", model="gpt-4"),
    completion(400, "model", "invalid_value", model=5),
    completion(400, "prompt", "invalid_value", prompt=5),
    completion(400, "prompt", "invalid_value", prompt=[]),
    completion(400, "prompt", "invalid_value", prompt=""),
    completion(400, "prompt", "invalid_value", prompt=["One", 5]),
    completion(400, "prompt", "invalid_value", prompt=[1, True]),
    completion(400, "prompt", "invalid_value", prompt=[10**9]),
    completion(400, "prompt", "invalid_value", prompt=[-1]),
    completion(400, "prompt", "context_length_exceeded", prompt="word " * (CONTEXT * 2)),
    completion(400, "prompt", "context_length_exceeded", prompt=[5] * (CONTEXT - 50), max_tokens=51),
    completion(400, "prompt", "too_many_sequences", prompt=["One"] * 100),
    completion(400, "max_tokens", "invalid_value", max_tokens=0),
    completion(400, "max_tokens", "invalid_value", max_tokens="5"),
    completion(400, "max_tokens", "invalid_value", max_tokens=2.5),
    completion(400, "max_tokens", "invalid_value", max_tokens=True),
    completion(400, "max_tokens", "invalid_value", max_tokens=MAX_TOKENS + 1),
    completion(400, None, "invalid_value", max_tokens=REFUSED_TOKENS),
    completion(400, "temperature", "invalid_value", temperature=-0.1),
    completion(400, "temperature", "invalid_value", temperature=3),
    completion(400, "temperature", "invalid_value", temperature="hot"),
    Wrong(400, "temperature", "invalid_value", b'{"model":"letters","prompt":"x","temperature":1e999}'),
    completion(400, "top_p", "invalid_value", top_p=0),
    completion(400, "min_p", "invalid_value", min_p=2),
    completion(400, "top_k", "invalid_value", top_k=-1),
    completion(400, "repetition_penalty", "invalid_value", repetition_penalty=0),
    completion(400, "presence_penalty", "invalid_value", presence_penalty=5),
    completion(400, "frequency_penalty", "invalid_value", frequency_penalty=-5),
    completion(400, "n", "invalid_value", n=0),
    completion(400, "n", "too_many_sequences", n=90),
    completion(400, "seed", "invalid_value", seed=2**63),
    completion(400, "stop", "invalid_value", stop=5),
    completion(400, "stop[1]", "invalid_value", stop=["a", ""]),
    completion(400, "stop", "invalid_value", stop=["a"] * 17),
    completion(400, "logprobs", "invalid_value", logprobs=6),
    completion(400, "stream", "invalid_value", stream="yes"),
    completion(400, "stream_options", "invalid_value", stream_options={"include_usage": True}),
    completion(400, "stream_options.x", "unknown_field", stream=True, stream_options={"x": 1}),
    completion(400, "best_of", "unsupported", best_of=2),
    completion(400, "use_beam_search", "unsupported", use_beam_search=True),
    completion(400, "echo", "invalid_value", echo=True, response_format={"type": "json_object"}),
    completion(400, "suffix", "unsupported", suffix="end"),
    completion(400, "logit_bias", "unsupported", logit_bias={"5": 1}),
    completion(400, "temprature", "unknown_field", temprature=1),
    # Not a chat.
    chat(400, "messages", "invalid_value", messages=[]),
    chat(400, "messages", "invalid_value", messages="Hello"),
    chat(400, "messages[0]", "invalid_value", messages=["Hello"]),
    chat(400, "messages[0].role", "missing_field", messages=[{"content": "x"}]),
    chat(400, "messages[0].role", "invalid_value", messages=[{"role": "function", "content": "x"}]),
    chat(400, "messages[0]", "unsupported", messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}]),
    chat(400, "messages[0]", "invalid_value", messages=[{"role": "user"}]),
    chat(
        400, "messages[0]", "invalid_value", messages=[{"role": "user", "content": "x", "tool_call_id": "1"}]
    ),
    chat(400, "messages[0]", "invalid_value", messages=[{"role": "assistant", "content": None}]),
    chat(400, "messages[0].content", "invalid_value", messages=[{"role": "user", "content": {}}]),
    chat(
        400,
        "messages[0].content[0]",
        "invalid_value",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ),
    chat(400, "messages[0].tool_calls[0].id", "missing_field", messages=[{**HELLO[0], "tool_calls": [{}]}]),
    chat(400, "messages[0].audio", "unsupported", messages=[{**HELLO[0], "audio": {"id": "1"}}]),
    chat(400, "tools[0].function", "missing_field", tools=[{"type": "function"}]),
    chat(400, "tools", "unsupported", tools=[TOOL]),
    chat(400, "tools[0].type", "invalid_value", tools=[{**TOOL, "type": "custom"}]),
    chat(400, "tool_choice", "invalid_value", tool_choice="required"),
    chat(400, "tool_choice", "invalid_value", tools=[TOOL], tool_choice="function"),
    chat(
        400,
        "tool_choice",
        "invalid_value",
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "other"}},
    ),
    chat(400, "functions", "unsupported", functions=[TOOL["function"]]),
    chat(400, "reasoning_effort", "unsupported", reasoning_effort="high"),
    chat(400, "metadata", "invalid_value", metadata="text"),
    chat(400, "response_format.type", "invalid_value", response_format={"type": "grammar"}),
    chat(400, "response_format", "invalid_value", response_format={"type": "json_schema"}),
    chat(400, "response_format.json_schema.schema", "missing_field", response_format=schema_format()),
    chat(400, "response_format.json_schema.name", "invalid_value", response_format=schema_format({}, "a b")),
    chat(400, "response_format.json_schema.schema", "invalid_value", response_format=schema_format([])),
    chat(400, "response_format", "invalid_value", response_format=schema_format({"not": {}})),
    chat(400, "response_format", "invalid_value", response_format=schema_format({"multipleOf": 9999991})),
    chat(400, "response_format", "invalid_value", response_format=schema_format({}), stop="}"),
    chat(400, "response_format", "invalid_value", response_format=schema_format({"anyOf": [NESTED]})),
    chat(
        400,
        "response_format.json_schema",
        "invalid_value",
        response_format={**schema_format({}), "type": "json_object"},
    ),
    chat(400, "response_format", "invalid_value", response_format={"type": "json_object"}, stop="}"),
    chat(400, "top_logprobs", "invalid_value", top_logprobs=2),
    chat(400, "top_logprobs", "invalid_value", logprobs=True, top_logprobs=21),
    chat(400, "max_completion_tokens", "invalid_value", max_tokens=2, max_completion_tokens=3),
    chat(
        400, "messages", "context_length_exceeded", messages=[{**HELLO[0], "content": "word " * CONTEXT * 2}]
    ),
    # Not a batch.
    Wrong(400, "prompts", "invalid_value", {"prompts": []}, BATCH),
    Wrong(400, "prompts[1]", "invalid_value", {"prompts": ["One", 5]}, BATCH),
    Wrong(400, "prompts[1]", "invalid_value", {"prompts": ["One", ""]}, BATCH),
    # Not an embedding.
    embedding(400, "input", "missing_field"),
    embedding(400, "input", "invalid_value", input=[]),
    embedding(400, "input", "invalid_value", input=""),
    embedding(400, "input[1]", "invalid_value", input=[[5], [10**9]]),
    embedding(400, "input", "too_many_sequences", input=["One"] * 100),
    embedding(400, "input", "context_length_exceeded", input=[5] * (CONTEXT + 1)),
    embedding(400, "dimensions", "unsupported", input="One", dimensions=8),
    embedding(400, "encoding_format", "invalid_value", input="One", encoding_format="int8"),
    embedding(404, "model", "model_not_found", input="One", model="other"),
    Wrong(404, "model", "model_not_found", {"prompts": ["One"], "model": ""}, BATCH),
    Wrong(400, "model", "invalid_value", {"prompts": ["One"], "model": ["capitals"]}, BATCH),
    # Paths, methods, types and sizes.
    Wrong(404, None, "not_found", path="/v1/nothing"),
    Wrong(404, "model", "model_not_found", path="/v1/models/other", method="GET"),
    Wrong(405, None, "method_not_allowed", method="GET"),
    Wrong(405, None, "method_not_allowed", path="/health", method="DELETE"),
    Wrong(415, None, "unsupported_media_type", {"model": MODEL, "prompt": "x"}, kind="text/plain"),
    Wrong(415, None, "unsupported_media_type", b"a=b", kind="application/x-www-form-urlencoded"),
    Wrong(413, None, "body_too_large", b" " * (MAX_BODY + 1)),
]
RAW = [
    b"what is this?\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",  # no Host
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 6000,  # 36 KB, and no end
]


def test_there_are_at_least_forty() -> None:
    assert len(WRONG) + len(RAW) >= 40


def test_each_gets_its_error_and_the_others_their_answers(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        stop = asyncio.Event()
        right = [asyncio.create_task(_ask_on(server, stop, seed)) for seed in range(3)]
        complaints = []
        for wrong in WRONG:
            content = wrong.body if isinstance(wrong.body, bytes) else json.dumps(wrong.body).encode()
            headers = {"content-type": wrong.kind} if wrong.method == "POST" else {}
            response = await server.client.request(wrong.method, wrong.path, content=content, headers=headers)
            found = response.json()["error"]
            kind = "invalid_request_error"
            if (response.status_code, found["param"], found["code"]) != (
                wrong.status,
                wrong.param,
                wrong.code,
            ):
                complaints.append((wrong, response.status_code, found))
            assert (
                found["message"]
                and found["type"] == kind
                and set(found) == {"message", "type", "param", "code"}
            )
        assert not complaints, "\n".join(map(str, complaints))
        for sent in RAW:
            assert (await server.raw(sent)).startswith(b"HTTP/1.1 400 ")
        stop.set()
        assert min(await asyncio.gather(*right)) > 0
        await server.until(lambda: not server.engine.running and server.service.admission.active == 0)

    served(scenario, tmp_path, max_body_bytes=MAX_BODY, max_tokens=MAX_TOKENS)


async def _ask_on(server: Live, stop: asyncio.Event, seed: int) -> int:
    """Ask rightly again and again; return how often."""
    text = "".join(chr(ord("a") + (seed + place) % 26) for place in range(6))
    asked = 0
    while not stop.is_set():
        response = await server.complete(seed=seed, max_tokens=6)
        assert response.json()["choices"][0]["text"] == text
        asked += 1
        await asyncio.sleep(0.05)
    return asked
