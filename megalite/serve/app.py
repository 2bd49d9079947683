"""The application: its endpoints, and what they share."""

import asyncio
import importlib.resources
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from megalite.errors import listed
from megalite.generation.request import Request as Prompt
from megalite.serve.admission import Admission
from megalite.serve.answers import Answer, BatchAnswer, ChatAnswer, CompletionAnswer, EmbeddingAnswer
from megalite.serve.body import read_body
from megalite.serve.engine_thread import EngineThread
from megalite.serve.errors import ApiError
from megalite.serve.generation_response import GenerationResponse, Serving
from megalite.serve.metrics import ServerMetrics
from megalite.serve.middleware import Gate
from megalite.serve.prompts import Prompts, ServedModel
from megalite.serve.schemas import BatchRequest, ChatRequest, CompletionRequest, EmbeddingRequest
from megalite.serve.settings import ServeSettings
from megalite.serve.token_text import ServedTokenText

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The page loads nothing from elsewhere, and no other page may show it in a frame.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}


class Service:
    """The model behind the endpoints: its engine, its limits and its metrics."""

    def __init__(self, model: ServedModel, engine: EngineThread, settings: ServeSettings):
        self.engine, self.settings, self._model = engine, settings, model
        self.admission, self.metrics = Admission(settings.capacity), ServerMetrics()
        self.metrics.active.set_function(lambda: self.admission.active)
        self._prompts, self._tokens = Prompts(model, settings), ServedTokenText(model.tokenizer)
        # Read now, so that an installation without the page fails at the start.
        self._page = importlib.resources.files("megalite.serve").joinpath("chat_page.html").read_text("utf-8")

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/", self._chat_page),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._show_metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/embeddings", self._embeddings, methods=["POST"]),
            Route("/batch_generate", self._batch, methods=["POST"]),
        ]
        paths = {route.path for route in routes}
        layers = [Middleware(Gate, keys=self.settings.keys, metrics=self.metrics, paths=paths)]
        if origins := self.settings.cors_origins:
            # Around the keys: a browser asks without one whether it may send a request.
            cors = Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                allow_private_network=True,
                expose_headers=("X-Request-Id", "Retry-After"),
            )
            layers.insert(0, cors)
        return Starlette(
            routes=routes, middleware=layers, exception_handlers={HTTPException: _of_http}, lifespan=None
        )

    async def _completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest, self.settings)
        self._note(request, body.model, body.user)
        prompts = self._of(body.model, await asyncio.to_thread(self._prompts.completion, body))
        tokens = sum(len(prompt.prompt_ids) for prompt in prompts[:: body.n])
        answer = CompletionAnswer(body.model, prompts, tokens, self._tokens, echo=body.echo)
        usage = body.stream_options is not None and body.stream_options.include_usage
        return self._generate(prompts, answer, stream=body.stream, include_usage=usage)

    async def _chat(self, request: Request) -> Response:
        body = await read_body(request, ChatRequest, self.settings)
        self._note(request, body.model, body.user)
        requests, tools = await asyncio.to_thread(self._prompts.chat, body)
        prompts = self._of(body.model, requests)
        answer = ChatAnswer(body.model, prompts, len(prompts[0].prompt_ids), self._tokens, tools)
        usage = body.stream_options is not None and body.stream_options.include_usage
        return self._generate(prompts, answer, stream=body.stream, include_usage=usage)

    async def _embeddings(self, request: Request) -> Response:
        body = await read_body(request, EmbeddingRequest, self.settings)
        self._note(request, body.model, body.user)
        prompts = self._of(body.model, await asyncio.to_thread(self._prompts.embeddings, body))
        tokens = sum(len(prompt.prompt_ids) for prompt in prompts)
        answer = EmbeddingAnswer(body.model, prompts, tokens, self._tokens)
        answer.base64 = body.encoding_format == "base64"
        return self._generate(prompts, answer)

    async def _batch(self, request: Request) -> Response:
        body = await read_body(request, BatchRequest, self.settings)
        name = self._model.name if body.model is None else body.model
        self._note(request, name, None)
        prompts = self._of(name, await asyncio.to_thread(self._prompts.batch, body))
        tokens = sum(len(prompt.prompt_ids) for prompt in prompts)
        return self._generate(prompts, BatchAnswer(name, prompts, tokens, self._tokens))

    def _generate(
        self, prompts: Sequence[Prompt], answer: Answer, *, stream: bool = False, include_usage: bool = False
    ) -> Response:
        serving = Serving(self.engine, self.admission, self.metrics, self.settings.request_seconds)
        return GenerationResponse(serving, prompts, answer, stream=stream, include_usage=include_usage)

    def _note(self, request: Request, name: str, user: str | None) -> None:
        """Keep the user for the log. ApiError for another model."""
        if user is not None:
            request.scope["state"]["user"] = user
        if name not in self._model.names:
            raise self._unknown(name)

    def _of(self, name: str, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Return the requests as those of a served model: the base, or one of its adapters."""
        return prompts if name == self._model.name else [replace(each, adapter=name) for each in prompts]

    def _unknown(self, name: str) -> ApiError:
        known = listed([repr(each) for each in self._model.names])
        message = f"the model {name[:200]!r} is not served here; use {known}"
        return ApiError(404, message, param="model", code="model_not_found")

    async def _models(self, request: Request) -> Response:
        served = [self._model_object(name) for name in self._model.names]
        return JSONResponse({"object": "list", "data": served})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._model.names:
            raise self._unknown(name)
        return JSONResponse(self._model_object(name))

    def _model_object(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "megalite",
            "root": self._model.name,
            "parent": None if name == self._model.name else self._model.name,
            "max_model_len": self._model.longest_sequence,
            "max_tokens": self.settings.max_tokens,
            "chat": self._model.chat is not None,
        }

    async def _health(self, request: Request) -> Response:
        failure = self.engine.failure
        if failure is not None:
            return JSONResponse({"status": "failed", "cause": str(failure)}, 503)
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self.admission.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not self.engine.running:
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "ready"})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=_METRICS_TYPE)

    async def _chat_page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=_PAGE_HEADERS)


async def _of_http(request: Request, error: Exception) -> Response:
    """Answer a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    status, path = error.status_code, ascii(request.url.path)
    message = f"{request.method} is not allowed on {path}" if status == 405 else f"there is no {path}"
    request.scope["state"]["error"] = message
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    return ApiError(status, message, code=code, headers=error.headers).response()
