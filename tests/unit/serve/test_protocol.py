"""OpenAI's interface of the server, over an engine that writes letters."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.generation import json_schema
from megalite.generation.json_schema import JSON_OBJECT
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.serving import ADAPTER, CONTEXT, MODEL, Live, served

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "seed": 0}


def data_of(text: str) -> list[Any]:
    """Return the events of a stream; [DONE] stays text."""
    frames = [frame.removeprefix("data: ") for frame in text.strip().split("\n\n")]
    return [frame if frame == "[DONE]" else json.loads(frame) for frame in frames]


def test_a_completion(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        response = await server.complete()
        assert response.status_code == 200
        body = response.json()
        assert body["object"] == "text_completion" and body["model"] == MODEL
        [choice] = body["choices"]
        assert choice == {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length"}
        usage = body["usage"]
        assert usage["completion_tokens"] == 4 and usage["prompt_tokens"] > 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + 4
        # The limit of OpenAI's interface, where a request names none.
        default = await server.client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "One", "seed": 0}
        )
        assert default.json()["choices"][0]["text"] == "abcdefghijklmnop"

    served(scenario, tmp_path)


@exhibit(
    "vllm-fork#773",
    subject="serving",
    there="a request with a seed ended the engine for everybody",
    here="choices of a request with a seed have seeds of their own, and are answered",
    fault=faults.CHOICES_SHARE_A_SEED,
)
def test_choices_of_several_prompts_have_seeds_of_their_own(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        body = (await server.complete(prompt=["One", "Two"], n=2)).json()
        assert [choice["text"] for choice in body["choices"]] == ["abcd", "bcde", "abcd", "bcde"]
        one = (await server.complete(prompt=[5, 6, 7])).json()
        assert one["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        many = (await server.complete(prompt=[[5], [6, 7]], n=2)).json()
        assert many["usage"]["prompt_tokens"] == 3 and len(many["choices"]) == 4

    served(scenario, tmp_path)


@exhibit(
    "vllm#7283",
    also=("vllm#7632",),
    subject="serving",
    there="an empty prompt ended the engine for everybody",
    here="it is refused, and the others get their answers",
    fault=faults.EMPTY_PROMPTS_REACH_THE_ENGINE,
)
@pytest.mark.parametrize("prompt", ["", []], ids=["no text", "no tokens"])
def test_nothing_to_read_is_refused_and_the_others_go_on(tmp_path: Path, prompt: Any) -> None:
    async def scenario(server: Live) -> None:
        for asked in (prompt, ["One", prompt]):
            response = await server.complete(prompt=asked)
            assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_value"
        assert (await server.complete()).json()["choices"][0]["text"] == "abcd"

    served(scenario, tmp_path)


@exhibit(
    "vllm#6521",
    also=("vllm#10432",),
    subject="serving",
    there="a request for no token ended the engine for everybody",
    here="it is refused, and the others get their answers",
    fault=faults.NO_TOKENS_REACH_THE_ENGINE,
)
def test_nothing_to_write_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        for tokens in (0, -1, 2**40):
            response = await server.complete(max_tokens=tokens)
            assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"
        assert (await server.complete(max_tokens=None)).json()["choices"][0]["text"] == "abcdefghijklmnop"

    served(scenario, tmp_path)


def test_a_stop_string_ends_the_text(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        for stop in ("c", ["x", "bc"]):
            [choice] = (await server.complete(stop=stop)).json()["choices"]
            assert choice["finish_reason"] == "stop" and choice["text"] == "ab"

    served(scenario, tmp_path)


def test_a_stream_of_a_completion(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        response = await server.complete(stream=True, n=2)
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = data_of(response.text)
        assert done == "[DONE]" and all("usage" not in chunk for chunk in chunks)
        for index, text in ((0, "abcd"), (1, "bcde")):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(each["text"] for each in own) == text
            assert [each["finish_reason"] for each in own] == [None, None, None, "length"]
        assert len({chunk["id"] for chunk in chunks}) == 1

    served(scenario, tmp_path)


def test_a_chat_and_its_stream_with_usage(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        body = (await server.client.post("/v1/chat/completions", json=CHAT)).json()
        assert body["object"] == "chat.completion"
        message = body["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "abc", "refusal": None}
        asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        response = await server.client.post("/v1/chat/completions", json=asked)
        first, *chunks, last, done = data_of(response.text)
        assert done == "[DONE]" and first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "abc"
        assert all(chunk["usage"] is None for chunk in [first, *chunks])
        assert last["choices"] == [] and last["usage"] == body["usage"]
        # Without a limit the context is filled.
        free = {key: value for key, value in CHAT.items() if key != "max_tokens"}
        whole = (await server.client.post("/v1/chat/completions", json=free)).json()
        assert whole["usage"]["total_tokens"] == CONTEXT

    served(scenario, tmp_path)


def test_an_echo_with_log_probabilities(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        prompt = "One two  three"
        ids = server.tokenizer.encode(prompt)
        for sent in (prompt, ids):
            asked = {"prompt": sent, "echo": True, "logprobs": 1, "max_tokens": 2}
            body = (await server.complete(**asked)).json()
            [choice] = body["choices"]
            logprobs = choice["logprobs"]
            assert choice["text"] == prompt + "ab" and choice["finish_reason"] == "length"
            assert body["usage"]["prompt_tokens"] == len(ids) and body["usage"]["completion_tokens"] == 2
            assert logprobs["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1) + [-0.5] * 2
            assert [top is None for top in logprobs["top_logprobs"]] == [True] + [False] * (len(ids) + 1)
            # An offset is the place of a token in the text.
            for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[
                : len(ids)
            ]:
                assert prompt[offset:].startswith(token)
            none = (await server.complete(**{**asked, "max_tokens": 0})).json()
            assert none["choices"][0]["text"] == prompt and none["usage"]["completion_tokens"] == 0
            assert none["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:-2]
            *chunks, _ = data_of((await server.complete(**asked, stream=True)).text)
            parts = [chunk["choices"][0] for chunk in chunks]
            assert "".join(part["text"] for part in parts) == choice["text"]
            for key, values in logprobs.items():
                assert [value for part in parts for value in part["logprobs"][key]] == values
        plain = (await server.complete(prompt=["One", "Two"], echo=True, max_tokens=0)).json()
        assert [choice["text"] for choice in plain["choices"]] == ["One", "Two"]
        assert plain["choices"][0]["logprobs"] is None

    served(scenario, tmp_path)


def test_log_probabilities_in_both_forms(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        logprobs = (await server.complete(logprobs=2, max_tokens=2)).json()["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == [-0.5, -0.5] and len(logprobs["tokens"]) == 2
        assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2]
        assert logprobs["text_offset"] == [0, len(logprobs["tokens"][0])]
        stream = data_of((await server.complete(logprobs=0, max_tokens=2, stream=True)).text)[:-1]
        offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in stream]
        assert offsets == [[0], [len(logprobs["tokens"][0])]]
        asked = {**CHAT, "logprobs": True, "top_logprobs": 3}
        body = (await server.client.post("/v1/chat/completions", json=asked)).json()
        content = body["choices"][0]["logprobs"]["content"]
        assert len(content) == 3 and [len(each["top_logprobs"]) for each in content] == [3, 3, 3]
        assert content[0]["logprob"] == -0.5 and bytes(content[0]["bytes"]).decode() == content[0]["token"]

    served(scenario, tmp_path)


def test_a_batch_of_prompts(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        body = {"prompts": ["One", "Two", "Three"], "max_tokens": 2, "seed": 5}
        answer = (await server.client.post("/batch_generate", json=body)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["fg", "fg", "fg"]
        assert answer["usage"]["completion_tokens"] == 6

    served(scenario, tmp_path)


def test_an_adapter_is_a_model_of_its_own(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        for model, text in ((MODEL, "abcd"), (ADAPTER, "ABCD")):
            body = (await server.complete(model=model)).json()
            assert body["model"] == model and body["choices"][0]["text"] == text
            batch = {"prompts": ["One", "Two"], "max_tokens": 4, "seed": 0, "model": model}
            answer = (await server.client.post("/batch_generate", json=batch)).json()
            assert answer["model"] == model and [each["text"] for each in answer["choices"]] == [text] * 2
        asked = {**CHAT, "model": ADAPTER, "stream": True}
        *chunks, _ = data_of((await server.client.post("/v1/chat/completions", json=asked)).text)
        assert {chunk["model"] for chunk in chunks} == {ADAPTER}
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "ABC"

    served(scenario, tmp_path)


def test_models_health_metrics_and_the_page(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        listed = (await server.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == [MODEL, ADAPTER]
        assert [model["parent"] for model in listed["data"]] == [None, MODEL]
        assert {model["root"] for model in listed["data"]} == {MODEL}
        assert {(model["max_model_len"], model["max_tokens"]) for model in listed["data"]} == {(CONTEXT, 50)}
        for model in listed["data"]:
            assert (await server.client.get(f"/v1/models/{model['id']}")).json() == model
        assert (await server.client.get("/health")).json() == {"status": "ok"}
        assert (await server.client.get("/ready")).json() == {"status": "ready"}
        page = await server.client.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text and "https://" not in page.text, "the page loads from elsewhere"
        # Without an icon of its own a browser asks for /favicon.ico.
        assert '<link rel="icon" href="data:,">' in page.text
        assert "img-src data:;" in page.headers["content-security-policy"]
        await server.complete()
        await server.complete(temperature=9)
        text = (await server.client.get("/metrics")).text
        for line in (
            'megalite_requests_total{path="/v1/completions",status="200"} 1.0',
            'megalite_requests_total{path="/v1/completions",status="400"} 1.0',
            "megalite_generated_tokens_total 4.0",
            "megalite_first_token_seconds_count 1.0",
            "megalite_inter_token_seconds_count 3.0",
            "megalite_active_sequences 0.0",
        ):
            assert line in text.splitlines()

    served(scenario, tmp_path, max_tokens=50)


def test_the_page_reads_what_the_server_says(tmp_path: Path) -> None:
    """The page drops old messages, and asks for a key, by the codes of errors."""

    async def scenario(server: Live) -> None:
        talk = [{"role": "user", "content": "word " * CONTEXT}]
        long = await server.client.post("/v1/chat/completions", json={**CHAT, "messages": talk})
        bare = await server.client.get("/v1/models", headers={"Authorization": ""})
        page = (await server.client.get("/")).text
        for response in (long, bare):
            assert f'error.code === "{response.json()["error"]["code"]}"' in page
        for name in ("max_model_len", "max_tokens", "chat"):
            assert f"model.{name}" in page

    served(scenario, tmp_path, keys=("a-key-of-some-length",))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "response_format": {"type": "text"}, "logit_bias": {}, "best_of": 1, "echo": False},
        {"tools": None, "store": None, "seed": 0, "user": "me", "top_p": None, "stop": None},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(tmp_path: Path, fields: dict[str, Any]) -> None:
    async def scenario(server: Live) -> None:
        assert (await server.complete(**fields)).json()["choices"][0]["text"] == "abcd"

    served(scenario, tmp_path)


def test_a_message_of_parts_and_an_answer_sent_back(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "abc", "refusal": None, "annotations": [], "tool_calls": None},
        {"role": "user", "content": "More"},
    ]

    async def scenario(server: Live) -> None:
        response = await server.client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
        assert response.status_code == 200

    served(scenario, tmp_path)


def test_a_request_id_is_echoed_or_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Live) -> None:
        with caplog.at_level("INFO", logger="megalite.serve"):
            given = await server.client.get("/health", headers={"X-Request-Id": "abc-1.2"})
            assert given.headers["x-request-id"] == "abc-1.2"
            forged = await server.client.get("/health", headers={"X-Request-Id": "a b; evil"})
            assert len(forged.headers["x-request-id"]) == 32
            await server.complete(user="line\nbreak")
            await server.client.get("/a%0Ab")
        lines = [record.getMessage() for record in caplog.records]
        assert any(line.startswith("abc-1.2 GET /health 200") for line in lines)
        assert not any("\n" in line for line in lines), "a client writes lines into the log"

    served(scenario, tmp_path)


def test_no_origin_is_let_in(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        origin = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
        asked = await server.client.options("/v1/completions", headers=origin)
        got = await server.client.get("/v1/models", headers=origin)
        for response in (asked, got):
            assert not [name for name in response.headers if name.startswith("access-control")]
        assert asked.status_code == 405
        # A page may send text elsewhere without asking first, but not JSON.
        plain = await server.client.post(
            "/v1/completions", content="{}", headers={"content-type": "text/plain"}
        )
        assert plain.status_code == 415
        rebound = await server.client.get("/v1/models", headers={"Host": "elsewhere.example"})
        assert rebound.status_code == 403 and rebound.json()["error"]["code"] == "host_not_allowed"

    served(scenario, tmp_path)


def test_chosen_origins_are_let_in(tmp_path: Path) -> None:
    origin, key = "https://mine.example", "a-key-of-some-length"

    def asked(name: str) -> dict[str, str]:
        return {
            "Origin": name,
            "Authorization": "",  # a browser asks without the key
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }

    async def scenario(server: Live) -> None:
        before = await server.client.options("/v1/chat/completions", headers=asked(origin))
        assert before.status_code == 200 and before.headers["access-control-allow-origin"] == origin
        assert "x-stainless-os" in before.headers["access-control-allow-headers"]
        assert "POST" in before.headers["access-control-allow-methods"]
        other = await server.client.options("/v1/chat/completions", headers=asked("https://other.example"))
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        # Errors can be read by the page, too.
        for bare, status in (({}, 200), ({"Authorization": ""}, 401)):
            answer = await server.client.get("/v1/models", headers={"Origin": origin, **bare})
            assert answer.status_code == status and answer.headers["access-control-allow-origin"] == origin
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        answer = await server.client.get("/v1/models", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in answer.headers

    served(scenario, tmp_path, cors_origins=(origin,), keys=(key,))


def test_all_origins_are_let_in(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        answer = await server.client.get("/v1/models", headers={"Origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*"

    served(scenario, tmp_path, cors_origins=("*",))


SECRET = "my secret words"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, "planted": 1}, "planted: the server knows no such field; remove it"),
    ("/v1/chat/completions", {**CHAT, "a\nb\x1b": 1}, "a b\\x1b: the server knows no such field"),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"1": 5}}, "logit_bias: this server does not support it"),
    ("/v1/chat/completions", {**CHAT, "model": "other"}, "the model 'other' is not served here"),
    ("/v1/completions", {"model": MODEL, "prompt": SECRET * 99}, "exceed the model's context"),
    ("/v1/completions", {"model": MODEL, "prompt": [SECRET, 5]}, "prompt: a list of texts"),
    ("/v1/nothing", {}, "there is no '/v1/nothing'"),
    (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "assistant", "content": SECRET}]},
        "invalid_value in messages",
    ),
]


def test_the_log_says_why_a_request_was_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for message in messages %}{{ raise_exception('no ' + message.content) }}{% endfor %}"

    async def scenario(server: Live) -> None:
        with caplog.at_level("INFO", logger="megalite.serve"):
            for path, body, _ in REFUSED:
                assert 400 <= (await server.client.post(path, json=body)).status_code < 500
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == len(REFUSED)
        for line, (path, _, reason) in zip(lines, REFUSED, strict=True):
            assert f"{path} 40" in line and reason in line.partition(", error: ")[2]
            assert SECRET not in line and line.isprintable()

    served(scenario, tmp_path, template=template)


def test_json_needs_its_package_and_a_schema_that_can_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: Live) -> None:
        asked: list[str | None] = []
        submit = server.engine.submit
        monkeypatch.setattr(
            server.engine, "submit", lambda request: (asked.append(request.json_schema), submit(request))[1]
        )
        schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}
        named = {"name": "numbers", "schema": schema, "strict": True, "description": "two of them"}
        formats = [{"type": "json_object"}, {"type": "json_schema", "json_schema": named}]
        for missing in (False, True):
            if missing:
                monkeypatch.setattr(json_schema, "PACKAGE", "no_such_package")
            for path, body in (
                ("completions", {"model": MODEL, "prompt": "One"}),
                ("chat/completions", CHAT),
            ):
                for each in formats:
                    response = await server.client.post(f"/v1/{path}", json={**body, "response_format": each})
                    if not missing:
                        assert response.status_code == 200, response.text
                        continue
                    error = response.json()["error"]
                    assert response.status_code == 400 and error["param"] == "response_format"
                    assert "needs the package no_such_package; install it" in error["message"]
        # A text has its properties in the order of the schema.
        assert asked == [JSON_OBJECT, json.dumps(schema, separators=(",", ":"))] * 2

    served(scenario, tmp_path)
