"""The response to a request that generates: whole or as server-sent events, while time and client allow it."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from megalite.errors import ConfigError
from megalite.generation.request import Request
from megalite.serve.admission import Admission
from megalite.serve.answers import Answer
from megalite.serve.engine_thread import EngineError, EngineJob, EngineThread
from megalite.serve.errors import ApiError
from megalite.serve.metrics import ServerMetrics, TokenClock

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_LAST_WORD_SECONDS = 1.0


@dataclass(frozen=True)
class Serving:
    """The parts of the server that every response uses. request_seconds: the time limit of a request."""

    engine: EngineThread
    admission: Admission
    metrics: ServerMetrics
    request_seconds: float


class GenerationResponse(Response):
    """Runs the sequences of one request when it is called.

    answer: collects them. stream: whether to send chunks; include_usage: with a last one of the usage. A client that
    goes away takes its sequences out of the engine.
    """

    def __init__(
        self,
        serving: Serving,
        requests: Sequence[Request],
        answer: Answer,
        *,
        stream: bool,
        include_usage: bool,
    ):
        # Not Response's own, which would render a body.
        self._serving, self._requests, self._answer = serving, requests, answer
        self._stream, self._include_usage, self._begun = stream, include_usage, False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._serving.admission.enter(len(self._requests)):
            job = await self._submit()
            self._serving.metrics.prompt_tokens.inc(self._answer.usage["prompt_tokens"])
            answering = asyncio.create_task(self._respond(job, scope, receive, send))
            leaving = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait(
                    {answering, leaving},
                    timeout=self._serving.request_seconds,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if answering.done():
                    answering.result()
                elif leaving.done():
                    self._serving.metrics.disconnects.inc()
                    scope["state"]["left"] = True
                else:
                    await self._stop(answering)
                    await self._refuse(_too_slow(self._serving.request_seconds), scope, send)
            except EngineError as error:
                await self._refuse(_failed(error), scope, send)
            finally:
                job.cancel()
                scope["state"]["tokens"] = self._answer.completion_tokens
                for task in (answering, leaving):
                    await self._stop(task)

    async def _submit(self) -> EngineJob:
        try:
            return await self._serving.engine.submit(self._requests)
        except ConfigError as error:
            raise ApiError(400, "; ".join(map(str, error.problems)), code="invalid_value") from error
        except EngineError as error:
            raise _failed(error) from error

    async def _respond(self, job: EngineJob, scope: Scope, receive: Receive, send: Send) -> None:
        clock = TokenClock(self._serving.metrics, len(self._requests))
        async for events in job:
            chunks: list[Mapping[str, Any]] = []
            for index, event in events:
                if event.token >= 0:
                    clock.token(index)
                self._answer.add(index, event)
                if self._stream:
                    chunks += self._answer.chunks(index, event)
            if self._stream:
                await self._send_chunks(chunks, send)
        if not self._stream:
            await JSONResponse(self._answer.whole())(scope, receive, send)
            return
        last = [self._answer.usage_chunk()] if self._include_usage else []
        await send(_body(_frames(last) + b"data: [DONE]\n\n", more=False))

    async def _send_chunks(self, chunks: Sequence[Mapping[str, Any]], send: Send) -> None:
        if not self._begun:
            # Not before the first token: until then an error still has a status of its own.
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            chunks = [*self._answer.first_chunks(), *chunks]
        if self._include_usage:
            chunks = [{**chunk, "usage": None} for chunk in chunks]
        if chunks:
            await send(_body(_frames(chunks), more=True))

    async def _refuse(self, error: ApiError, scope: Scope, send: Send) -> None:
        """End with an error: as a response, or as the last event of a stream that has begun."""
        if not self._begun:
            raise error
        # The status of the log line is that of the beginning.
        scope["state"]["error"] = error.log_text
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_SECONDS):
                await send(_body(_frames([error.body]), more=False))

    @staticmethod
    async def _stop(task: "asyncio.Task[None]") -> None:
        task.cancel()
        await asyncio.wait({task})


async def _left(receive: Receive) -> None:
    """Return once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _frames(chunks: Sequence[Mapping[str, Any]]) -> bytes:
    texts = (json.dumps(chunk, ensure_ascii=False, separators=(",", ":")) for chunk in chunks)
    return b"".join(b"data: " + text.encode() + b"\n\n" for text in texts)


def _body(content: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


def _too_slow(seconds: float) -> ApiError:
    return ApiError(504, f"the answer took more than the server's {seconds:g} s", code="request_timeout")


def _failed(error: EngineError) -> ApiError:
    return ApiError(503, f"the engine has ended: {error}", code="engine_failed")
