"""`megalite serve` as a process: the official openai client, ranks, and the ways a server ends."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import httpx2
import openai
import pytest
import torch
from pydantic import BaseModel, Field

from megalite.generation.loaded import LoadedModel, load
from megalite.generation.prompts import prompt_ids
from megalite.generation.text import generate
from megalite.topology.adapter import Lora
from tests.support.adapters import peft_folder
from tests.support.jobs import ROOT
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.waiting import PATIENCE, soon, wait_until

PROMPT = "Once upon a time"


@dataclass
class Server:
    """A process of `megalite serve`. errors: the lines of its stderr so far."""

    process: "subprocess.Popen[str]"
    port: int
    errors: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ranks(self) -> list[int]:
        """Return the processes of the ranks, in order."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return sorted(map(int, children.split()))

    def ended(self) -> int:
        """Return the exit code; AssertionError if the server goes on."""
        return self.process.wait(timeout=PATIENCE)


@contextmanager
def serving(model: Path, *arguments: str) -> Iterator[Server]:
    """Run a server on a free port; kill it at the end of the `with` block if it still runs."""
    command = [sys.executable, "-m", "megalite", "serve", str(model), "--port", "0", *arguments]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    reading = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reading.start()
    stuck = threading.Timer(PATIENCE, process.kill)
    stuck.start()
    try:
        found = re.search(r":(\d+)$", process.stdout.readline().strip())
        stuck.cancel()
        assert found is not None, "".join(errors)
        yield Server(process, int(found[1]), errors)
    finally:
        stuck.cancel()
        process.kill()
        process.wait()
        reading.join(timeout=PATIENCE)
        process.stdout.close()


def test_the_official_client(shared_data: Path, tmp_path: Path) -> None:
    model = shared_data / "stories260K"
    folder = peft_folder(tmp_path / "adapter", model, Lora(4, 8.0, ("q_proj", "o_proj", "up_proj")))
    expected, adapted = (
        generate(load(each), PROMPT, tokens=24).removeprefix(PROMPT) for each in (model, folder)
    )
    with serving(model, "--chat-template", "chatml", "--adapter", f"mine={folder}") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        served, adapter = [each.id for each in client.models.list()]
        assert (served, adapter) == ("stories260K", "mine") and adapted != expected
        plain = client.completions.create(
            model=served, prompt=PROMPT, temperature=0, max_tokens=24, logprobs=2
        )
        [choice] = plain.choices
        assert choice.text == expected and choice.finish_reason == "length"
        assert plain.usage is not None and plain.usage.completion_tokens == 24
        assert choice.logprobs is not None and len(choice.logprobs.token_logprobs or []) == 24

        echoed = client.completions.create(
            model=served, prompt=PROMPT, echo=True, max_tokens=0, logprobs=2
        ).choices[0]
        loaded = load(model)
        ids = prompt_ids(loaded.tokenizer, PROMPT)
        log_probs = loaded.logits(torch.tensor([ids]))[0].double().log_softmax(-1)
        first, *others = echoed.logprobs.token_logprobs
        assert echoed.text == PROMPT and first is None
        assert_close(
            others, log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0], rtol=FLOAT32_RTOL
        )

        def streamed(seed: int, model: str = served) -> str:
            chunks = client.completions.create(
                model=model, prompt=PROMPT, temperature=0, max_tokens=24, seed=seed, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in chunks)

        def sampled(seed: int) -> list[str]:
            answer = client.completions.create(
                model=served, prompt=PROMPT, n=2, max_tokens=24, seed=seed, top_p=0.9, frequency_penalty=0.5
            )
            return [each.text for each in answer.choices]

        alone = [sampled(seed) for seed in range(6)]
        with ThreadPoolExecutor(12) as pool:
            # Together as alone, whatever is in the batch.
            texts, samples = pool.map(streamed, range(6)), pool.map(sampled, range(6))
            of_adapter = pool.map(streamed, range(6), [adapter] * 6)
            assert set(texts) == {expected} and list(samples) == alone and set(of_adapter) == {adapted}
        assert len({text for pair in alone for text in pair}) > 6

        chat = client.chat.completions.create(
            model=served,
            messages=[{"role": "user", "content": "Tell me a story"}],
            max_completion_tokens=8,
            seed=3,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = list(chat)
        assert last.usage is not None and last.usage.completion_tokens <= 8 and not last.choices
        assert chunks[0].choices[0].delta.role == "assistant"
        stopped = client.completions.create(
            model=served, prompt=PROMPT, temperature=0, max_tokens=24, stop=expected[5:9]
        )
        assert stopped.choices[0].text == expected[: expected.index(expected[5:9])]
        assert stopped.choices[0].finish_reason == "stop"
        _ask_for_a_schema(client, served)
        _ask_for_embeddings(client, served, load(model))
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="does not support"):
            client.chat.completions.create(
                model=served,
                messages=[{"role": "user", "content": "x"}],
                logit_bias={"5": 1},
            )
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
    assert any("POST /v1/completions 200" in line for line in server.errors)


class Cat(BaseModel):
    name: Literal["Tom", "Kitty"]
    lives: Annotated[int, Field(ge=1, le=9)]


def _ask_for_a_schema(client: openai.OpenAI, served: str) -> None:
    """Ask for objects of a pydantic model: whole, as a stream and side by side; a schema that is refused."""
    messages = [{"role": "user", "content": "Which cat?"}]
    for seed in range(3):
        parsed = client.chat.completions.parse(
            model=served, messages=messages, response_format=Cat, seed=seed, n=2, max_tokens=60
        )
        assert all(isinstance(each.message.parsed, Cat) for each in parsed.choices)
    with client.chat.completions.stream(
        model=served, messages=messages, response_format=Cat, seed=1, max_tokens=60
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Cat)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=served, messages=messages, response_format=Cat, max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as refused:
        client.chat.completions.create(
            model=served,
            messages=messages,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        )
    assert refused.value.param == "response_format"


def _ask_for_embeddings(client: openai.OpenAI, served: str, loaded: LoadedModel) -> None:
    """Ask for embeddings as base64, which is the client's default, and as numbers; for wrong ones."""
    texts = ["Once upon a time", "The cat sat", "The cat sat"]
    answer = client.embeddings.create(model=served, input=texts)
    ids = prompt_ids(loaded.tokenizer, texts[0])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(ids)
    chunk = loaded.model.whole
    with torch.inference_mode():
        hidden = chunk.normed(chunk.decode(torch.tensor([ids]), torch.arange(len(ids))[None]))[0, -1]
    first, second, third = (each.embedding for each in answer.data)
    assert_close(torch.tensor(first), hidden / hidden.norm(), rtol=FLOAT32_RTOL)
    assert second == third and first != second
    plain = client.embeddings.create(model=served, input=ids, encoding_format="float").data[0].embedding
    assert_close(plain, first, rtol=FLOAT32_RTOL)
    with pytest.raises(openai.BadRequestError, match="dimensions: this server does not support it"):
        client.embeddings.create(model=served, input="x", dimensions=8)
    with pytest.raises(openai.BadRequestError, match="exceed the model's context of 512; shorten the text"):
        client.embeddings.create(model=served, input=["x", "word " * 600])


@pytest.mark.parametrize("layout", ["--pipeline 2", pytest.param("--tensor 2", marks=pytest.mark.slow)])
def test_ranks_serve_drain_and_end(shared_data: Path, layout: str) -> None:
    model = shared_data / "stories260K"
    expected = generate(load(model), PROMPT, tokens=24).removeprefix(PROMPT)
    body = {"model": "stories260K", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    with serving(model, *layout.split()) as server:
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).json()
        assert answer["choices"][0]["text"] == expected
        long = {**body, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=long, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        assert server.ended() == 0, "".join(server.errors)


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["busy", "idle"])
def test_a_killed_rank_ends_the_server_with_the_cause(shared_data: Path, busy: bool) -> None:
    with serving(shared_data / "stories260K", "--pipeline", "2") as server:
        body = {"model": "stories260K", "prompt": PROMPT, "max_tokens": 400, "stream": True}
        begin, seen = 0.0, set()
        with ThreadPoolExecutor(1) as pool, httpx2.Client(base_url=server.url, timeout=PATIENCE) as client:
            running = None
            if busy:
                running = pool.submit(client.post, "/v1/completions", json=body)

                def computes() -> bool:
                    return "active_sequences 1.0" in client.get("/metrics").text

                wait_until(computes, "the request is not computed", process=server.process)
            assert client.get("/health").status_code == 200
            begin = time.monotonic()
            os.kill(server.ranks()[1], signal.SIGKILL)

            def unreachable() -> bool:
                try:
                    seen.add(client.get("/health").status_code)
                except httpx2.TransportError:
                    return True
                return False

            wait_until(unreachable, "the server goes on", every=0)
            if running is not None:
                running.exception(timeout=PATIENCE)
        assert server.ended() == 1 and time.monotonic() - begin < soon(5)
        [report] = re.findall(r"full report: (\S+)", "".join(server.errors))
        assert "SIGKILL" in Path(report).read_text()
        shutil.rmtree(Path(report).parent)
    assert 503 in seen, "health did not tell"
    text = "".join(server.errors)
    assert re.search(r"rank 1 .*was killed by signal 9", text), text
