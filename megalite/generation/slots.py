"""The requests that run in one key-value cache: which slot each has, and which tokens the next forward computes.

No torch. Every rank keeps the same table, so that a plan needs no message.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megalite.generation.request import Request

if TYPE_CHECKING:
    from megalite.generation.json_schema import JsonText
    from megalite.model.kv_cache import KeyValueCache

# Shorter common beginnings are computed again: a search and a copy cost about as much.
_SHORTEST_REUSE = 16


@dataclass(frozen=True)
class TokenScore:
    """A token of a prompt. logprob: log probability; None: it is the first. top_logprobs: the most likely tokens."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Running:
    """A request that waits or runs.

    ids: its prompt, then its new tokens. cached: how many of them are in the cache, or in the forward that computes
    them. counts: new token -> occurrences, for the penalties. prompt: the different tokens of the prompt.
    constraint: of the new tokens. prompt_scores: of the tokens of a prompt that is scored, so far.
    """

    number: int
    request: Request
    constraint: "JsonText | None" = None
    ids: list[int] = field(init=False)
    cached: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    prompt: frozenset[int] = field(init=False)
    prompt_scores: list[TokenScore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt_ids)
        self.prompt = frozenset(self.ids) if self.request.sampling.repetition_penalty != 1 else frozenset()

    @property
    def fills(self) -> bool:
        """True while tokens of the prompt are left to compute."""
        return self.cached < len(self.request.prompt_ids)

    @property
    def new_tokens(self) -> int:
        """The number of tokens generated so far."""
        return len(self.ids) - len(self.request.prompt_ids)

    def add(self, token: int) -> None:
        """Append a new token."""
        self.ids.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1


@dataclass(frozen=True)
class Piece:
    """Tokens of a prompt to compute: `count` of them behind the first `start`, in slot `slot`."""

    running: Running
    slot: int
    start: int
    count: int

    @property
    def scored(self) -> list[int]:
        """The tokens of the prompt that the tokens to compute predict, if the request asks for their scores."""
        if not self.running.request.scores_prompt:
            return []
        return list(self.running.request.prompt_ids[self.start + 1 : self.start + self.count + 1])


@dataclass(frozen=True)
class Plan:
    """One forward. decoding: the requests of slots 0 to n - 1, one token each. pieces: of prompts, slots ascending."""

    decoding: tuple[Running, ...]
    pieces: tuple[Piece, ...]

    @property
    def ids(self) -> list[int]:
        """The tokens to compute: the last one of each decoding request, then those of the pieces."""
        tokens = [each.ids[-1] for each in self.decoding]
        for piece in self.pieces:
            tokens.extend(piece.running.ids[piece.start : piece.start + piece.count])
        return tokens

    @property
    def adapters(self) -> list[str | None]:
        """The adapter of each of the tokens to compute."""
        names = [each.request.adapter for each in self.decoding]
        for piece in self.pieces:
            names.extend([piece.running.request.adapter] * piece.count)
        return names

    @property
    def completes(self) -> list[bool]:
        """Whether each row has a next token: decoding requests, and pieces that end their prompt."""
        ends = [piece.start + piece.count == len(piece.running.request.prompt_ids) for piece in self.pieces]
        return [True] * len(self.decoding) + ends


class SlotTable:
    """The slots of one cache. slots: how many. chunk: the most tokens of prompts in one forward.

    Requests stand in slots 0 to n - 1, in order; only the last of them may still have tokens of its prompt to compute.
    reuse: a new request takes the keys of a common beginning from any slot, of an ended request too, if its own adapter
    computed them.
    """

    def __init__(self, buffers: "KeyValueCache", slots: int, chunk: int, *, reuse: bool):
        self._buffers, self._chunk, self._reuse = buffers, chunk, reuse
        self.running: list[Running] = []
        # The tokens whose keys each slot holds, and the adapter that computed them.
        self._held: list[list[int]] = [[] for _ in range(slots)]
        self._adapters: list[str | None] = [None] * slots

    @property
    def free(self) -> int:
        """The number of slots without a request."""
        return len(self._held) - len(self.running)

    def plan(self, waiting: list[Running], most: int) -> Plan | None:
        """Return the next forward, or None; admits requests from the front of `waiting` into free slots.

        most: the number of requests that may run in this table.
        """
        decoding = tuple(running for running in self.running if not running.fills)
        pieces: list[Piece] = []
        left = self._chunk
        while left > 0:
            if len(decoding) + len(pieces) == len(self.running):
                if not waiting or not self.free or len(self.running) >= most:
                    break
                self._admit(waiting.pop(0))
            slot = len(decoding) + len(pieces)
            filling = self.running[slot]
            count = min(left, len(filling.request.prompt_ids) - filling.cached)
            pieces.append(Piece(filling, slot, filling.cached, count))
            left -= count
        return Plan(decoding, tuple(pieces)) if decoding or pieces else None

    def launched(self, plan: Plan) -> None:
        """Note that the tokens of a plan are in the cache."""
        for slot, running in enumerate(plan.decoding):
            self._held[slot].append(running.ids[-1])
            running.cached += 1
        for piece in plan.pieces:
            piece.running.cached += piece.count
            self._held[piece.slot] = piece.running.ids[: piece.running.cached]

    def leave(self, running: Running) -> None:
        """Free the slot of a request and close the gap; the keys stay until the slot is used again."""
        place, last = self.running.index(running), len(self.running) - 1
        if self.running[last].fills and place < last:
            # The request whose prompt is not complete stays behind all others.
            self._swap(place, last - 1)
            place = last - 1
        self._swap(place, last)
        self.running.pop()

    def _admit(self, running: Running) -> None:
        slot = len(self.running)
        self.running.append(running)
        reuse = self._reuse and not running.request.scores_prompt
        source, tokens = self._longest_beginning(running.request) if reuse else (slot, 0)
        if tokens and source != slot:
            self._buffers.copy(source, slot, tokens)
        self._held[slot] = list(running.request.prompt_ids[:tokens])
        self._adapters[slot] = running.request.adapter
        running.cached = tokens

    def _longest_beginning(self, request: Request) -> tuple[int, int]:
        """Return the slot that holds the longest beginning of the prompt, and its length, without the last token."""
        prompt_ids = request.prompt_ids
        first, longest = list(prompt_ids[:_SHORTEST_REUSE]), (0, 0)
        if len(prompt_ids) <= _SHORTEST_REUSE:
            return longest
        for slot, tokens in enumerate(self._held):
            if tokens[:_SHORTEST_REUSE] == first and self._adapters[slot] == request.adapter:
                most = min(len(tokens), len(prompt_ids) - 1)
                differing = (place for place in range(most) if tokens[place] != prompt_ids[place])
                longest = max(
                    longest, (slot, next(differing, most)), key=lambda slot_and_length: slot_and_length[1]
                )
        return longest

    def _swap(self, first: int, second: int) -> None:
        if first == second:
            return
        tokens, adapters, running = self._held, self._adapters, self.running
        self._buffers.swap(first, second, max(len(tokens[first]), len(tokens[second])))
        tokens[first], tokens[second] = tokens[second], tokens[first]
        adapters[first], adapters[second] = adapters[second], adapters[first]
        running[first], running[second] = running[second], running[first]
