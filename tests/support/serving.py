"""A server in this process, over an engine that computes nothing."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from megalite.data.chat.chat_template import load_chat_template
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalite.errors import ConfigError, Problem
from megalite.generation.batch_engine import Event
from megalite.generation.json_schema import JsonGrammars
from megalite.generation.prompts import Chat
from megalite.generation.request import Request
from megalite.generation.slots import TokenScore
from megalite.serve.address import listen
from megalite.serve.app import Service
from megalite.serve.engine_thread import EngineThread
from megalite.serve.prompts import ServedModel
from megalite.serve.server import run_server
from megalite.serve.settings import ServeSettings
from tests.support.tiny import END_OF_DOCUMENT, tiny_tokenizer
from tests.support.waiting import PATIENCE

MODEL, ADAPTER = "letters", "capitals"
CONTEXT = 160
REFUSED_TOKENS = 47  # of a request that the engine refuses, though the server lets it pass


class LettersEngine:
    """Writes letters: the first depends on the seed, each next one follows in the alphabet; capitals with an adapter.

    pace: seconds of a step. failure: raised by the next step. script: what every text is instead, up to its end.
    requests: all that were submitted.
    """

    def __init__(self, pace: float = 0.0):
        self.pace, self.failure, self.script = pace, None, ""
        self.requests: list[Request] = []
        self.running: dict[int, tuple[Request, str]] = {}
        self.submitted, self.cancelled, self.steps, self.idle_steps = 0, 0, 0, 0
        self.closed = False
        self.threads: set[int] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def submit(self, request: Request) -> int:
        self.threads.add(threading.get_ident())
        if request.max_tokens == REFUSED_TOKENS:
            raise ConfigError([Problem("tokens", "do not fit the cache", "use fewer")], "the request")
        self.submitted += 1
        self.requests.append(request)
        self.running[self.submitted] = (request, "")
        return self.submitted

    def cancel(self, number: int) -> None:
        self.threads.add(threading.get_ident())
        self.cancelled += self.running.pop(number, None) is not None

    def step(self) -> list[Event]:
        self.threads.add(threading.get_ident())
        if self.failure is not None:
            raise self.failure
        if self.running:
            self.steps += 1
            time.sleep(self.pace)
        else:
            self.idle_steps += 1
        return [self._event(number) for number in list(self.running)]

    def close(self) -> None:
        self.closed = True

    def _event(self, number: int) -> Event:
        request, text = self.running[number]
        scores: tuple[TokenScore, ...] = ()
        if request.scores_prompt and not text:
            first, *others = request.prompt_ids
            scores = (TokenScore(first), *(TokenScore(token, -0.25, ((token, -0.25),)) for token in others))
        if request.max_tokens == 0:
            del self.running[number]
            return Event(number, -1, None, (), "length", prompt_scores=scores, text="")
        new = chr(ord("a") + (request.sampling.seed + len(text)) % 26)
        new = new if request.adapter is None else new.upper()
        if self.script:
            new = self.script[len(text)]
        self.running[number] = (request, text + new)
        finish = "length" if len(text) + 1 == request.max_tokens else None
        if text + new == self.script:
            finish = "stop"
        if any((text + new).endswith(stop) for stop in request.stop):
            finish, new = "stop", ""
        if finish is not None:
            del self.running[number]
        asked = request.logprobs is not None
        top = tuple((ord("!") + place, -1.0 - place) for place in range(request.logprobs or 0))
        return Event(number, ord("!"), -0.5 if asked else None, top, finish, prompt_scores=scores, text=new)


@dataclass
class Live:
    """A server that runs. client: of httpx2, at its address."""

    port: int
    client: httpx2.AsyncClient
    engine: LettersEngine
    service: Service
    tokenizer: Tokenizer
    task: "asyncio.Task[None]"

    async def complete(self, **fields: Any) -> httpx2.Response:
        """POST /v1/completions."""
        body = {"model": MODEL, "prompt": "One", "max_tokens": 4, "seed": 0, **fields}
        return await self.client.post("/v1/completions", json=body)

    async def raw(self, sent: bytes, *, end: bool = False) -> bytes:
        """Send bytes over a connection of their own; return all that comes back. end: close our side behind them."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        if end:
            writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    async def until(self, happened: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait until something has happened; AssertionError if it does not."""
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, "it did not happen in time"
            await asyncio.sleep(0.01)


def letters_service(
    folder: Path, engine: LettersEngine, settings: ServeSettings, template: str | None, context: int
) -> Service:
    """Return the service of a tiny tokenizer and an engine that writes letters. template: its text; None: chatml."""
    tiny_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    known = load_chat_template(folder, "chatml", END_OF_DOCUMENT)
    chat = Chat(tokenizer, folder, known if template is None else replace(known, text=template))
    model = ServedModel(MODEL, tokenizer, chat, context, 1_700_000_000, JsonGrammars(tokenizer), (ADAPTER,))
    return Service(model, EngineThread(engine), settings)


@asynccontextmanager
async def live(
    folder: Path,
    *,
    pace: float = 0.0,
    ends: bool = True,
    template: str | None = None,
    context: int = CONTEXT,
    **settings: Any,
) -> AsyncIterator[Live]:
    """Run a server within the `with` block, and then end it by SIGTERM; ends: whether that is left to this function."""
    engine = LettersEngine(pace)
    chosen = ServeSettings(port=0, **{"host": "127.0.0.1", "drain_seconds": 5.0, **settings})
    service = letters_service(folder, engine, chosen, template, context)
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_server(service, listen(chosen), on_ready=ready.set_result))
    await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
    port = await ready
    headers = {"Authorization": f"Bearer {chosen.keys[0]}"} if chosen.keys else {}
    async with httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=PATIENCE, verify=False
    ) as client:
        try:
            yield Live(port, client, engine, service, load_tokenizer(folder), task)
        finally:
            if ends and not task.done():
                os.kill(os.getpid(), signal.SIGTERM)
        if ends:
            await task


def served(scenario: Callable[[Live], Awaitable[None]], folder: Path, **settings: Any) -> None:
    """Run a scenario against a server of its own."""

    async def run() -> None:
        async with live(folder, **settings) as server:
            await scenario(server)

    asyncio.run(asyncio.wait_for(run(), timeout=PATIENCE))
