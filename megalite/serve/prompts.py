"""Turns the bodies of requests into sequences for the engine."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import ConfigError, DataError
from megalite.generation.json_schema import JSON_OBJECT, JsonGrammars, schema_text
from megalite.generation.prompts import Chat, prompt_ids
from megalite.generation.request import GREEDY, Request, Sampling
from megalite.generation.stops import NO_STOPS, Stops
from megalite.serve.errors import ApiError
from megalite.serve.schemas import (
    BatchRequest,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponseFormat,
    SamplingFields,
)
from megalite.serve.settings import ServeSettings
from megalite.serve.tools import ToolUse, call_schema, template_messages, tool_use

_DEFAULT_TOKENS = 16  # OpenAI's, for completions
_SEEDS = 2**63


@dataclass(frozen=True)
class ServedModel:
    """A model as the server knows it, beside its engine.

    name: in requests. chat: the form of conversations; None: no chat. longest_sequence: tokens of prompt and answer.
    created: seconds since 1970. grammars: of the engine, which compile schemas here, before the engine has a request.
    adapters: the names of those beside the model; a request names one as its model. stops: what ends its texts.
    """

    name: str
    tokenizer: Tokenizer
    chat: Chat | None
    longest_sequence: int
    created: int
    grammars: JsonGrammars
    adapters: tuple[str, ...] = ()
    stops: Stops = NO_STOPS

    @property
    def names(self) -> tuple[str, ...]:
        """The models that a request may name: the base, then the adapters."""
        return (self.name, *self.adapters)


class Prompts:
    """Makes the engine's requests for one model; its methods take milliseconds for long texts, and raise ApiError."""

    def __init__(self, model: ServedModel, settings: ServeSettings):
        self._model, self._settings = model, settings

    def completion(self, body: CompletionRequest) -> list[Request]:
        """Return the sequences of /v1/completions: `n` of the first prompt, then `n` of the next one."""
        limit = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        if limit == 0 and not body.echo:
            message = "max_tokens: 0 new tokens need echo = true; use 1 or more"
            raise ApiError(400, message, param="max_tokens", code="invalid_value")
        if body.echo and body.response_format.type != "text":
            message = "echo: the prompt would stand before the JSON of response_format; leave one of them out"
            raise ApiError(400, message, param="echo", code="invalid_value")
        self._check_count(len(body.prompt) * body.n, "n" if body.n > 1 else "prompt")
        sequences: list[Request] = []
        for name, ids in self._encoded("prompt", body.prompt):
            limit_here = self._limit(ids, limit, name, "max_tokens")
            sequences += self._choices(ids, limit_here, body, body.n, body.logprobs)
        if body.echo and (limit == 0 or body.logprobs is not None):
            return [replace(request, scores_prompt=True) for request in sequences]
        return self._formed(sequences, body.response_format, body.stop)

    def chat(self, body: ChatRequest) -> tuple[list[Request], ToolUse | None]:
        """Return the `n` sequences of /v1/chat/completions, and how calls of tools are read from their answers."""
        chat = self._model.chat
        if chat is None:
            raise ApiError(
                400,
                f"the model {self._model.name} has no chat template; start the server with --chat-template, "
                "or use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        self._check_count(body.n, "n")
        with_tools = bool(body.tools) or any(each.tool_calls or each.role == "tool" for each in body.messages)
        form = chat.tool_form if with_tools else None
        messages, tools = template_messages(body.messages, form), tool_use(body, form)
        shown = [] if tools is None else [tool.for_template for tool in body.tools]
        try:
            ids = chat.prompt_ids(messages, tools=shown, begun="" if tools is None else tools.begun)
        except DataError as error:
            # Behind the semicolon stands a remedy for those who train.
            message = str(error).partition(";")[0]
            raise ApiError(400, message, param="messages", code="invalid_value", quotes=True) from error
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        setting = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        limit = self._limit(ids, max_tokens, "messages", setting)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sequences = list(self._choices(ids, limit, body, body.n, logprobs, chat.stops))
        if tools is None:
            return self._formed(sequences, body.response_format, body.stop), None
        if tools.forced:
            return self._constrained(sequences, call_schema(body, tools.form), "tools", body.stop), tools
        return [replace(each, shown_ids=chat.tool_form_ids) for each in sequences], tools

    def embeddings(self, body: EmbeddingRequest) -> list[Request]:
        """Return the requests of /v1/embeddings, one for each input."""
        self._check_count(len(body.input), "input")
        sequences, most = list[Request](), self._model.longest_sequence
        for name, ids in self._encoded("input", body.input):
            if len(ids) > most:
                message = f"{name}: {len(ids)} tokens exceed the model's context of {most}; shorten the text"
                raise ApiError(400, message, param=name, code="context_length_exceeded")
            sequences.append(Request(ids, 0, GREEDY, frozenset(), embeds=True))
        return sequences

    def batch(self, body: BatchRequest) -> list[Request]:
        """Return the sequences of /batch_generate, one for each prompt."""
        self._check_count(len(body.prompts), "prompts")
        sequences: list[Request] = []
        for name, ids in self._encoded("prompts", body.prompts):
            sequences += self._choices(
                ids, self._limit(ids, body.max_tokens, name, "max_tokens"), body, 1, None
            )
        return sequences

    def _encoded(
        self, field: str, prompts: Sequence[str | Sequence[int]]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name of each prompt of a field, for errors, and its tokens: of a text, or as they are."""
        for index, prompt in enumerate(prompts):
            name = f"{field}[{index}]" if len(prompts) > 1 else field
            ids = prompt_ids(self._model.tokenizer, prompt) if isinstance(prompt, str) else prompt
            if not ids:
                raise ApiError(400, f"{name}: it has no tokens", param=name, code="invalid_value")
            known = self._model.tokenizer.vocab_size
            if wrong := [token for token in ids if not 0 <= token < known]:
                message = f"{name}: {wrong[0]} is not one of the {known} token ids"
                raise ApiError(400, message, param=name, code="invalid_value")
            yield name, tuple(ids)

    def _limit(self, ids: Sequence[int], asked: int | None, name: str, setting: str) -> int:
        """Return the new tokens of a sequence; None: as many as the model and the server allow."""
        room = self._model.longest_sequence - len(ids)
        most = self._settings.max_tokens
        if asked is not None and asked > most:
            message = f"{setting}: {asked} tokens are more than the server's {most}; lower it"
            raise ApiError(400, message, param=setting, code="invalid_value")
        least = 1 if asked is None else asked
        if room < least:
            raise ApiError(
                400,
                f"{name}: {len(ids)} tokens and {least} new ones exceed the model's context of "
                f"{self._model.longest_sequence}; shorten the prompt or lower {setting}",
                param=name,
                code="context_length_exceeded",
            )
        return min(room, most) if asked is None else asked

    def _check_count(self, count: int, name: str) -> None:
        if count > self._settings.capacity:
            message = (
                f"{name}: {count} sequences are more than the {self._settings.capacity} that the server takes"
            )
            raise ApiError(400, message, param=name, code="too_many_sequences")

    def _choices(
        self,
        ids: Sequence[int],
        max_tokens: int,
        body: SamplingFields,
        count: int,
        logprobs: int | None,
        chat: Stops = NO_STOPS,
    ) -> Iterator[Request]:
        """Yield `count` sequences of a prompt, with seeds in a row. chat: what ends an answer."""
        seed = secrets.randbelow(_SEEDS) if body.seed is None else body.seed
        stops = self._model.stops
        stop_ids = frozenset({self._model.tokenizer.end_of_document_id}) | stops.ids | chat.ids
        stop = tuple(dict.fromkeys((*body.stop, *stops.texts, *chat.texts)))
        if body.ignore_eos:
            stop_ids, stop = frozenset(), body.stop
        for index in range(count):
            sampling = replace(Sampling.of(dict(body)), seed=(seed + index) % _SEEDS)
            yield Request(tuple(ids), max_tokens, sampling, stop_ids, stop, logprobs)

    def _formed(self, requests: list[Request], form: ResponseFormat, stop: tuple[str, ...]) -> list[Request]:
        """Return the requests in the form of `response_format`. stop: of the body."""
        if form.type == "text":
            return requests
        schema = None if form.json_schema is None else form.json_schema.definition
        return self._constrained(requests, schema, "response_format", stop)

    def _constrained(
        self, requests: list[Request], schema: Mapping[str, Any] | None, field: str, stop: tuple[str, ...]
    ) -> list[Request]:
        """Return requests for JSON of a schema; None: any object.

        field: of the body that asks for it, for errors. stop: of the body; the template's texts could cut the JSON.
        """
        try:
            text = JSON_OBJECT if schema is None else schema_text(schema)
            self._model.grammars.check(text)
        except ConfigError as error:
            message = "; ".join(f"{each.message}; {each.remedy}" for each in error.problems)
            raise ApiError(400, f"{field}: {message}", param=field, code="invalid_value") from error
        return [replace(each, json_schema=text, stop=stop) for each in requests]
