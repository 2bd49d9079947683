"""Other people's clients of OpenAI's interface, each as its own documentation uses it, against `megalite serve`.

Each is skipped where its package is absent. To try one: install it into an environment of its own that also sees this
one's packages, and run `python -m pytest -m slow tests/end_to_end/test_clients.py` there.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from megalite.generation.loaded import load
from megalite.generation.text import generate
from tests.end_to_end.test_serve import PROMPT, Server, serving
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.tool_templates import HERMES
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow
MODEL, KEY = "stories260K", "none"
ASK: Any = [{"role": "user", "content": "Ulm?"}]
TOKENS = 120  # more than the longest answer of a schema has


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Ulm", "Bonn"]
    sky: Literal["sun", "rain"]


@pytest.fixture(scope="module")
def model(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with more positions, since the description of tools takes hundreds of tokens of its small vocabulary."""
    folder = shutil.copytree(shared_data / MODEL, tmp_path_factory.mktemp("model") / MODEL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    (folder / "hermes.jinja").write_text(HERMES)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model, "--chat-template", str(model / "hermes.jinja")) as running:
        yield running


@pytest.fixture
def base(server: Server) -> str:
    return f"{server.url}/v1"


def installed(name: str) -> Any:
    return pytest.importorskip(name, reason=f"the client {name} is not installed")


def test_instructor(base: str) -> None:
    instructor, openai = installed("instructor"), installed("openai")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(
            openai.OpenAI(base_url=base, api_key=KEY, timeout=PATIENCE), mode=mode
        )
        found = client.chat.completions.create(
            model=MODEL, response_model=Weather, messages=ASK, max_tokens=TOKENS, max_retries=0, temperature=0
        )
        assert isinstance(found, Weather)


def test_pydantic_ai(base: str) -> None:
    installed("pydantic_ai")
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base, api_key=KEY))
    settings: Any = {"max_tokens": TOKENS, "temperature": 0}
    for output in (Weather, NativeOutput(Weather)):
        agent = Agent(model, output_type=output, model_settings=settings)
        assert isinstance(agent.run_sync("Ulm?").output, Weather)
    assert agent.run_sync("Ulm?").usage is not None
    plain = Agent(model, model_settings={**settings, "max_tokens": 8})

    async def streamed() -> str:
        async with plain.run_stream("Ulm?") as answer:
            return "".join([text async for text in answer.stream_text(delta=True)])

    assert asyncio.run(streamed()) == plain.run_sync("Ulm?").output != ""


def test_langchain(base: str) -> None:
    installed("langchain_openai")
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(
        model=MODEL, base_url=base, api_key=KEY, temperature=0, max_tokens=TOKENS, stream_usage=True
    )
    assert isinstance(chat.with_structured_output(Weather, method="json_schema").invoke("Ulm?"), Weather)
    assert isinstance(chat.with_structured_output(Weather, method="function_calling").invoke("Ulm?"), Weather)
    forced = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    first = forced.invoke("Ulm?")
    assert isinstance(first, AIMessage)
    [call] = first.tool_calls
    assert Weather.model_validate(call["args"])
    chunks = list(forced.stream("Ulm?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [each["args"] for each in whole.tool_calls] == [call["args"]] and whole.usage_metadata
    talk = [HumanMessage("Ulm?"), first, ToolMessage("rain", tool_call_id=call["id"])]
    assert chat.bind(max_tokens=4).bind_tools([Weather]).invoke(talk).content is not None
    vectors = OpenAIEmbeddings(model=MODEL, base_url=base, api_key=KEY, check_embedding_ctx_length=False)
    assert len(vectors.embed_query("Ulm")) == 64


def test_litellm(base: str) -> None:
    litellm = installed("litellm")
    fields: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": base, "api_key": KEY, "temperature": 0}
    plain = litellm.completion(messages=ASK, max_tokens=8, metadata={"run": "x"}, user="me", **fields)
    assert plain.choices[0].message.content
    chunks = list(litellm.completion(messages=ASK, max_tokens=8, stream=True, **fields))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    tool = {"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}
    named = {"type": "function", "function": {"name": "Weather"}}
    called = litellm.completion(messages=ASK, tools=[tool], tool_choice=named, max_tokens=TOKENS, **fields)
    [call] = called.choices[0].message.tool_calls
    assert Weather.model_validate_json(call.function.arguments)
    # The message is sent back as the client keeps it.
    talk = [*ASK, called.choices[0].message.model_dump()]
    talk.append({"role": "tool", "tool_call_id": call.id, "name": "Weather", "content": "rain"})
    assert litellm.completion(messages=talk, tools=[tool], max_tokens=4, **fields).choices
    old = litellm.text_completion(
        prompt=PROMPT, max_tokens=4, **{**fields, "model": f"text-completion-openai/{MODEL}"}
    )
    assert old.choices[0].text


def test_llm(base: str, tmp_path: Path) -> None:
    installed("llm")
    line = {"model_id": "here", "model_name": MODEL, "api_base": base, "supports_tools": True}
    schema = {**line, "model_id": "formed", "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([line, schema]))
    environ = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": KEY}

    def ask(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    options = ("-o", "temperature", "0", "-o", "max_tokens", "8")
    streamed = ask("-m", "here", *options, "Ulm?")
    assert streamed.strip() and ask("-m", "here", "--no-stream", *options, "Ulm?") == streamed
    assert ask("-m", "here", "--continue", *options, "And now?")
    formed = ask(
        "-m",
        "formed",
        "-o",
        "max_tokens",
        str(TOKENS),
        "--schema",
        json.dumps(Weather.model_json_schema()),
        "Ulm?",
    )
    assert Weather.model_validate_json(formed)
    assert ask("-m", "here", *options, "-T", "llm_time", "Ulm?") is not None


NODE = """
import OpenAI from "openai";
const [base, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Ulm?" }];
const properties = { city: { enum: ["Ulm"] } };
const parameters = { type: "object", properties, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const plain = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0 });
let text = "";
const stream = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0, stream: true });
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
const helper = client.chat.completions.stream({ model, messages, tools, tool_choice: "required", max_tokens: 120 });
const called = (await helper.finalChatCompletion()).choices[0];
const call = called.message.tool_calls[0];
const talk = [...messages, called.message, { role: "tool", tool_call_id: call.id, content: "rain" }];
const after = await client.chat.completions.create({ model, messages: talk, tools, max_tokens: 4 });
let code = "";
try { await client.chat.completions.create({ model, messages, logit_bias: { 5: 1 } }); }
catch (error) { code = error.code; }
const vector = await client.embeddings.create({ model, input: "Ulm" });
console.log(JSON.stringify({ same: plain.choices[0].message.content === text, text, call, finish: called.finish_reason,
  choices: after.choices.length, code, length: vector.data[0].embedding.length }));
"""


def test_the_npm_client(base: str, tmp_path: Path) -> None:
    modules = Path(os.environ.get("NODE_MODULES", "node_modules"))
    if shutil.which("node") is None or not (modules / "openai").is_dir():
        pytest.skip("node, or the npm package openai in the folder NODE_MODULES, is not installed")
    (tmp_path / "node_modules").symlink_to(modules.resolve())
    (tmp_path / "ask.mjs").write_text(NODE)
    command = ["node", "ask.mjs", base, MODEL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"] and found["text"] and found["choices"] == 1 and found["length"] == 64
    assert found["call"]["function"]["name"] == "weather" and found["finish"] == "tool_calls"
    assert json.loads(found["call"]["function"]["arguments"]) == {"city": "Ulm"}
    assert found["code"] == "unsupported"


def test_lm_eval_over_http_gives_the_figures_of_hf(base: str, model: Path, tmp_path: Path) -> None:
    installed("lm_eval"), installed("tenacity")  # of lm_eval[api]
    from tests.unit.evaluate.test_harness import figures, write_tasks

    story = generate(load(model), PROMPT, tokens=60)
    names = write_tasks(tmp_path, [story, story[20:], story[40:]])
    scored, written = names[:2], names[2]
    of_hf = f"pretrained={model},dtype=float32"
    theirs = figures("hf", names, tmp_path, model_args=of_hf, device="cpu")
    common = f"model={MODEL},num_concurrent=1,max_retries=1"
    completions = f"{common},base_url={base}/completions,tokenizer={model},max_length=2047,add_bos_token=True"
    ours = figures("local-completions", names, tmp_path, model_args=completions)
    for name in scored:
        for key, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert_close(ours["results"][name][key], value, rtol=FLOAT32_RTOL, what=f"{name} {key}")
    # hf decodes the new tokens alone, which drops the space before the first one.
    answers = [[each["resps"][0][0].lstrip() for each in of["samples"][written]] for of in (ours, theirs)]
    assert answers[0] == answers[1] and any(answers[0])
    chat = figures(
        "local-chat-completions",
        [written],
        tmp_path,
        model_args=f"{common},base_url={base}/chat/completions",
        apply_chat_template=True,
    )
    assert len(chat["samples"][written]) == 3
