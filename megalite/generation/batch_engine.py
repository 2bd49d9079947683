"""Continuous batching of requests for text: what a server, a batch of prompts and a single prompt use."""

from dataclasses import dataclass, field

from megalite.generation.detokenise import Detokeniser, StopScan
from megalite.generation.json_schema import JsonGrammars
from megalite.generation.layout_and_memory import DEFAULT_TOKENS
from megalite.generation.loaded import LoadedModel
from megalite.generation.request import Request, check_request
from megalite.generation.token_engine import PREFILL_CHUNK, Finish, Sampled, TokenEngine
from megalite.model.kv_cache import CacheSize
from megalite.parallel.mesh import COLLECTIVE_SECONDS

# An idle engine of several ranks takes an empty step this often: far within the time limit of a collective, and a lost
# rank is noticed within seconds.
IDLE_STEP_SECONDS = COLLECTIVE_SECONDS / 600


@dataclass(frozen=True)
class Event(Sampled):
    """A new token of a request, with its text.

    text: the text that is new with it, without special tokens and without a stop string; "" while it may still change.
    finish: "stop" also for a string that stops the request.
    """

    text: str = field(kw_only=True)


class _Text:
    """The text of one request."""

    def __init__(self, loaded: LoadedModel, request: Request):
        self._request, self._tokenizer = request, loaded.tokenizer
        self._tokens = Detokeniser(loaded.tokenizer, request.prompt_ids)
        self._scan = StopScan(request.stop)

    def push(self, sampled: Sampled) -> Event:
        """Return the event of a token, which may find a stop string, or of a request without one."""
        text, finish = self._read(sampled) if sampled.token >= 0 else ("", sampled.finish)
        return Event(**{**vars(sampled), "finish": finish}, text=text)

    def _read(self, sampled: Sampled) -> tuple[str, Finish | None]:
        """Return the text that is new with a token, and why the request ends with it."""
        new = ""
        if sampled.token in self._request.shown_ids:
            new = self._tokens.finish() + self._tokenizer.decode([sampled.token])
        elif sampled.token not in self._request.stop_ids:
            new = self._tokens.push(sampled.token)
        if sampled.finish is not None:
            new += self._tokens.finish()
        text, stopped = self._scan.push(new)
        if stopped:
            return text, "stop"
        return text + (self._scan.finish() if sampled.finish is not None else ""), sampled.finish


class BatchEngine:
    """Requests that share the forwards of one model; they join and leave between two steps.

    max_requests: how many run at a time; others wait in the order of their numbers. max_tokens: the most tokens of one
    request, prompt included; None: the model's positions, at most DEFAULT_TOKENS. The cache is allocated for all of
    them. prefill_chunk: the most tokens of prompts in one step, between which the running requests go on.

    Rank 0 decides: on the other ranks `step` takes its requests, so they either make the same calls, or call
    `serve_steps`, which returns when rank 0 calls `close`. One thread makes all calls, but those of `grammars`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_requests: int = 16,
        max_tokens: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ):
        self._loaded, self._mesh = loaded, loaded.replica.mesh
        longest = loaded.config.longest_sequence
        self.max_tokens = min(longest, DEFAULT_TOKENS if max_tokens is None else max_tokens)
        size = CacheSize(max_requests, self.max_tokens)
        self._engine = TokenEngine(
            loaded.replica, size, prefill_chunk=prefill_chunk, adapters=loaded.adapters
        )
        self._texts: dict[int, _Text] = {}
        self.grammars = JsonGrammars(loaded.tokenizer)
        self._next = 0
        # Number -> a new request, or None: it is cancelled. Rank 0's reach the other ranks with the next step.
        self._changes: list[tuple[int, Request | None]] = []

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._changes) or self._engine.has_work

    def submit(self, request: Request) -> int:
        """Take a request; return its number, which its events carry.

        Raises ConfigError for a request that can never run: an empty prompt, ids outside of the vocabulary, more tokens
        than the model's positions or `max_tokens`, an unknown adapter, a `json_schema` that cannot be compiled.
        """
        check_request(request, self._loaded.config, self.max_tokens, self._loaded.source.adapters)
        if request.json_schema is not None:
            self.grammars.check(request.json_schema)
        number, self._next = self._next, self._next + 1
        self._changes.append((number, request))
        return number

    def cancel(self, number: int) -> None:
        """End a request without another event; nothing happens if it has ended."""
        self._changes.append((number, None))

    def step(self) -> list[Event]:
        """Run one forward of whatever is due, on all ranks, and return its events; [] if there is nothing to do.

        With pipeline stages the events are those of an earlier forward. While the engine of several ranks is idle, rank
        0 must still call this every IDLE_STEP_SECONDS: the other ranks wait in a collective, which has a time limit.
        """
        return self._step(self._mesh.broadcast_object(self._changes))

    def serve_steps(self) -> None:
        """On every rank but rank 0: take part in its steps until it calls `close`."""
        while (changes := self._mesh.broadcast_object(None)) is not None:
            self._step(changes)

    def close(self) -> None:
        """On rank 0: end `serve_steps` of the other ranks."""
        self._mesh.broadcast_object(None)

    def _step(self, changes: list[tuple[int, Request | None]]) -> list[Event]:
        self._apply(changes)
        if not self._engine.has_work:
            return []
        events = []
        for sampled in self._engine.step():
            text = self._texts.get(sampled.number)
            if text is None:
                continue
            event = text.push(sampled)
            if event.finish is not None:
                del self._texts[sampled.number]
                if sampled.finish is None:
                    self._engine.cancel(sampled.number)
            events.append(event)
        return events

    def _apply(self, changes: list[tuple[int, Request | None]]) -> None:
        self._changes = []
        for number, request in changes:
            if request is not None:
                self._engine.submit(number, request, self.grammars.constraint(request))
                self._texts[number] = _Text(self._loaded, request)
            elif self._texts.pop(number, None) is not None:
                self._engine.cancel(number)
