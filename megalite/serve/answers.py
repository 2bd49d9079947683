"""The answers to requests: OpenAI's objects, whole and as chunks of a stream."""

import struct
import time
import uuid
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megalite.generation.request import Request
from megalite.serve.token_text import ServedTokenText

if TYPE_CHECKING:
    from megalite.generation.batch_engine import Event


@dataclass
class Choice:
    """One sequence of an answer, so far. offset: characters of the tokens whose log-probabilities were shown."""

    events: "list[Event]" = field(default_factory=list)
    offset: int = 0

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish(self) -> str | None:
        return self.events[-1].finish if self.events else None


class Answer(ABC):
    """Base of all kinds of answers. prompt_tokens: of each prompt, once."""

    prefix, kind = "", ""

    def __init__(self, model: str, requests: Sequence[Request], prompt_tokens: int, tokens: ServedTokenText):
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._model, self._prompt_tokens, self._tokens = model, prompt_tokens, tokens
        self._logprobs = requests[0].logprobs is not None
        self.choices = [Choice() for _ in requests]

    def add(self, index: int, event: "Event") -> None:
        """Take an event of sequence `index`."""
        self.choices[index].events.append(event)

    @property
    def completion_tokens(self) -> int:
        """New tokens of all sequences so far."""
        return sum(len(choice.events) for choice in self.choices)

    @property
    def usage(self) -> dict[str, int]:
        """The numbers of tokens."""
        new = self.completion_tokens
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self._prompt_tokens + new,
        }

    def whole(self) -> dict[str, Any]:
        """Return the object of an answer that is not streamed."""
        choices = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._head(self.kind), "choices": choices, "usage": self.usage}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks before the first token."""
        return []

    def chunk(self, index: int, event: "Event") -> dict[str, Any] | None:
        """Return the chunk of an event; None: the event shows nothing, or this kind of answer does not stream."""
        return None

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream that asked for the usage."""
        return {**self._head(self.chunk_kind), "choices": [], "usage": self.usage}

    @property
    def chunk_kind(self) -> str:
        """The object of a chunk."""
        return self.kind

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self._model}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.chunk_kind), "choices": [choice]}

    @abstractmethod
    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return a sequence as the answer that is not streamed has it."""


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    prefix, kind = "cmpl", "text_completion"

    def chunk(self, index: int, event: "Event") -> dict[str, Any] | None:
        if not event.text and event.finish is None and not self._logprobs:
            return None
        logprobs = None
        if self._logprobs:
            choice = self.choices[index]
            logprobs = self._tokens.completion([event], choice.offset)
            choice.offset += len(logprobs["tokens"][0])
        return self._chunk(
            {"index": index, "text": event.text, "logprobs": logprobs, "finish_reason": event.finish}
        )

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = self._tokens.completion(choice.events, 0) if self._logprobs else None
        return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    prefix, kind = "chatcmpl", "chat.completion"

    @property
    def chunk_kind(self) -> str:
        return "chat.completion.chunk"

    def first_chunks(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(len(self.choices))
        ]

    def chunk(self, index: int, event: "Event") -> dict[str, Any] | None:
        if not event.text and event.finish is None and not self._logprobs:
            return None
        delta = {"content": event.text} if event.text else {}
        logprobs = {"content": [self._tokens.chat(event)], "refusal": None} if self._logprobs else None
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": event.finish}
        )

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [self._tokens.chat(event) for event in choice.events], "refusal": None}
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}


class BatchAnswer(Answer):
    """The answer of /batch_generate."""

    prefix, kind = "batch", "batch_generate"

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        tokens = len(choice.events)
        return {
            "index": index,
            "text": choice.text,
            "finish_reason": choice.finish,
            "completion_tokens": tokens,
        }


class EmbeddingAnswer(Answer):
    """The answer of /v1/embeddings. base64: the embeddings are little-endian float32 numbers in base64."""

    base64 = False

    @property
    def completion_tokens(self) -> int:
        return 0

    def whole(self) -> dict[str, Any]:
        data = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        usage = {"prompt_tokens": self._prompt_tokens, "total_tokens": self._prompt_tokens}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        numbers = choice.events[0].embedding or ()
        shown: list[float] | str = list(numbers)
        if self.base64:
            shown = b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
        return {"object": "embedding", "index": index, "embedding": shown}
