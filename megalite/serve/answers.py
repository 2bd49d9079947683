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
from megalite.generation.slots import TokenScore
from megalite.serve.token_text import ServedTokenText
from megalite.serve.tools import ToolStream, ToolUse

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
        return sum(event.token >= 0 for choice in self.choices for event in choice.events)

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

    def chunks(self, index: int, event: "Event") -> list[dict[str, Any]]:
        """Return the chunks of an event; [] if it shows nothing, or this kind of answer does not stream."""
        return []

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
    """The answer of /v1/completions. echo: it begins with the prompt."""

    prefix, kind = "cmpl", "text_completion"

    def __init__(
        self,
        model: str,
        requests: Sequence[Request],
        prompt_tokens: int,
        tokens: ServedTokenText,
        *,
        echo: bool = False,
    ):
        super().__init__(model, requests, prompt_tokens, tokens)
        self._prompts = [tokens.prompt(request.prompt_ids) for request in requests] if echo else []

    def chunks(self, index: int, event: "Event") -> list[dict[str, Any]]:
        begins = bool(self._prompts) and len(self.choices[index].events) == 1
        if not event.text and event.finish is None and not self._logprobs and not begins:
            return []
        return [self._chunk(self._part(index, [event], begins=begins))]

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._part(index, choice.events, begins=bool(self._prompts))

    def _part(self, index: int, events: "Sequence[Event]", *, begins: bool) -> dict[str, Any]:
        """Return events of a sequence that follow each other. begins: behind the prompt, which is part of the text."""
        echo, offsets = self._prompts[index] if begins else ("", [])
        logprobs = None
        if self._logprobs:
            choice = self.choices[index]
            choice.offset += len(echo)
            scores = [*events[0].prompt_scores] if begins else []
            offsets = [*offsets]
            for event in events:
                if event.token >= 0:
                    scores.append(TokenScore(event.token, event.logprob, event.top_logprobs))
                    offsets.append(choice.offset)
                    choice.offset += len(self._tokens.text(event.token))
            logprobs = self._tokens.completion(scores, offsets)
        text = echo + "".join(event.text for event in events)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": events[-1].finish}


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions. tools: how its calls are read; None: it has none."""

    prefix, kind = "chatcmpl", "chat.completion"

    def __init__(
        self,
        model: str,
        requests: Sequence[Request],
        prompt_tokens: int,
        tokens: ServedTokenText,
        tools: ToolUse | None,
    ):
        super().__init__(model, requests, prompt_tokens, tokens)
        self._tools = tools
        self._streams = [] if tools is None else [ToolStream(tools) for _ in requests]

    @property
    def chunk_kind(self) -> str:
        return "chat.completion.chunk"

    def first_chunks(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(len(self.choices))
        ]

    def chunks(self, index: int, event: "Event") -> list[dict[str, Any]]:
        text, calls = event.text, list[dict[str, Any]]()
        if self._streams:
            text, calls = self._streams[index].push(event.text, ends=event.finish is not None)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        logprobs = {"content": [self._tokens.chat(event)], "refusal": None} if self._logprobs else None
        choices = []
        if delta or self._logprobs:
            choices.append({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None})
        if event.finish is not None:
            finish = self._finish(event.finish, calls)
            choices.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": finish})
        return [self._chunk(choice) for choice in choices]

    def _finish(self, finish: str, calls: Sequence[Any]) -> str:
        return self._tools.finish if self._tools is not None and calls and finish == "stop" else finish

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [self._tokens.chat(event) for event in choice.events], "refusal": None}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        finish = choice.finish
        if self._tools is not None:
            content, calls = self._tools.divide(choice.text)
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
                finish = self._finish(finish or "stop", calls)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}


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
