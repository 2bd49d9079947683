"""Continuous batching of token ids: requests join and leave between forwards, over the ranks of one copy of a model.

Context-parallel ranks share the tokens of long prompts, and compute all others alike: each has the whole cache.
With several stages there are as many tables of requests as stages. Each forward computes one table; while a later stage
computes it, the earlier stages compute the other tables.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import pad

from megalite.generation.json_schema import JsonText
from megalite.generation.request import Request
from megalite.generation.sampling import (
    sampled_rows,
    sampled_width,
    scored_rows,
    width_with_embeddings,
    with_embeddings,
)
from megalite.generation.slots import Plan, Running, SlotTable, TokenScore
from megalite.model.adapters import Adapters
from megalite.model.context import StepContext
from megalite.model.decode import empty_cache, last_hidden_states
from megalite.model.kv_cache import CachedStep, CacheSize, KeyValueCache, PromptSegment, computed_tokens
from megalite.model.replica import Replica
from megalite.parallel.collectives import Pending, broadcast
from megalite.parallel.context_prefill import SegmentShare
from megalite.parallel.decode import Sends, start_from_last_chunk
from megalite.parallel.host_copies import on_device

Finish = Literal["stop", "length"]
PREFILL_CHUNK = 512
_SCORED_AT_ONCE = 64  # tokens of prompts, whose logits exist at once in float64
# Their angles depend on the length of the whole prompt, so that keys of another prompt are other keys.
_ANGLES_OF_WHOLE_PROMPT = ("dynamic", "longrope")


@dataclass(frozen=True)
class Sampled:
    """A new token of a request.

    logprob: its log probability by the model, before penalties and temperature; None: not asked for. top_logprobs: the
    most likely tokens with theirs. finish: why it is the last token; None: it is not. embedding: [H], asked for instead
    of a token, which is -1, as the token of a request for none is. prompt_scores: with the first token.
    """

    number: int
    token: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]
    finish: Finish | None
    embedding: tuple[float, ...] | None = None
    prompt_scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class _Launch:
    """A forward whose tokens are not known yet.

    rows: the requests that get one. scored: behind them, a request for each token of a prompt that gets a score.
    """

    table: SlotTable
    rows: tuple[Running, ...]
    scored: tuple[Running, ...]
    values: Pending


class TokenEngine:
    """Requests over one model. Every rank of its mesh must make the same calls in the same order.

    size: the slots and tokens of the cache. prefill_chunk: the most tokens of prompts in one forward, for each
    context-parallel rank. adapters: those that requests may name.
    """

    def __init__(
        self,
        model: Replica,
        size: CacheSize,
        *,
        prefill_chunk: int = PREFILL_CHUNK,
        adapters: Adapters | None = None,
    ):
        self._model, self._most, self._adapters = model, size.slots, adapters or Adapters()
        stages = model.mesh.pp.size
        per_table = CacheSize(-(-size.slots // stages), size.tokens)
        scaling = model.shape.rope_scaling
        reuse = scaling is None or scaling.rope_type not in _ANGLES_OF_WHOLE_PROMPT
        prefill_chunk *= model.mesh.cp.size
        self._caches: dict[SlotTable, KeyValueCache] = {}
        for _ in range(stages):
            cache = empty_cache(model, per_table)
            self._caches[SlotTable(cache, per_table.slots, prefill_chunk, reuse=reuse)] = cache
        self._tables = deque(self._caches)
        self._waiting: list[Running] = []
        self._in_flight: deque[_Launch] = deque()
        self._sends = Sends(2 * len(model.split.layers))

    @property
    def has_work(self) -> bool:
        """True while a request waits, runs, or a forward has not been collected."""
        return bool(self._waiting or self._in_flight or any(table.running for table in self._tables))

    def submit(self, number: int, request: Request, constraint: JsonText | None = None) -> None:
        """Append a request, which fits the cache, to those that wait."""
        self._waiting.append(Running(number, request, constraint))

    def cancel(self, number: int) -> None:
        """End a request, if it waits or runs, without another token."""
        self._waiting = [running for running in self._waiting if running.number != number]
        for table in self._tables:
            for running in [running for running in table.running if running.number == number]:
                table.leave(running)

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        """Launch the forward of the next table, and return the new tokens of the oldest one if all are in flight."""
        table = self._tables[0]
        self._tables.rotate(-1)
        sampled: list[Sampled] = []
        while any(each.table is table for each in self._in_flight):
            sampled += self._collect()
        launched = self._launch(table)
        if self._in_flight and (len(self._in_flight) == len(self._tables) or not launched):
            sampled += self._collect()
        return sampled

    def _launch(self, table: SlotTable) -> bool:
        """Compute this stage's part of the table's next forward; return whether it has one."""
        plan = table.plan(self._waiting, self._share())
        if plan is None:
            return False
        table.launched(plan)
        rows = [*plan.decoding, *(piece.running for piece in plan.pieces)]
        sampling = tuple(row for row, ends in zip(rows, plan.completes, strict=True) if ends)
        values = self._forward(plan, self._caches[table], sampling)
        scored = tuple(piece.running for piece in plan.pieces for _ in piece.scored)
        self._in_flight.append(_Launch(table, sampling, scored, values))
        return True

    def _share(self) -> int:
        """Return the number of requests that one table may have, so that all tables have about as many."""
        requests = len(self._waiting) + sum(len(table.running) for table in self._tables)
        return -(-min(requests, self._most) // len(self._tables))

    def _forward(self, plan: Plan, cache: KeyValueCache, rows: tuple[Running, ...]) -> Pending:
        """Run the stages; return what waits for the values of `with_embeddings`."""
        model, mesh = self._model, self._model.mesh
        step = self._step_of(plan, cache)
        inputs, context = step.on_device, StepContext(cache=step, adapters=step.adapters)
        hidden = last_hidden_states(
            model, inputs.input_ids, inputs.position_ids, context=context, sends=self._sends
        )
        scored = [token for piece in plan.pieces for token in piece.scored]
        if not rows and not scored:
            return lambda: torch.empty(0, 2)
        if hidden is None or mesh.cp.rank:
            alike = (*rows, *(piece.running for piece in plan.pieces if piece.scored))
            width = width_with_embeddings(sampled_width(alike), rows, model.shape.hidden_size)
            values = torch.empty(len(rows) + len(scored), width, dtype=torch.float64, device=mesh.device)
        else:
            places = [at for at, ends in zip(step.last_tokens, plan.completes, strict=True) if ends]
            last = hidden
            if len(places) < hidden.shape[1]:
                last = hidden[:, on_device([torch.tensor(places, dtype=torch.int64)], mesh.device)[0]]
            head = model.stage.chunks[-1]
            values = sampled_rows(head.logits(last)[0], rows) if rows else torch.empty(0, 2)
            if any(row.request.embeds for row in rows):
                values = with_embeddings(values, head.normed(last)[0], rows)
            if scored:
                values = self._with_scores(values, hidden, plan, step.segments)
        if hidden is not None and mesh.cp.size > 1:
            # Rank 0 has the last token of every prompt, and decides for all, so that their caches stay alike.
            broadcast(values, mesh.cp, 0)
        return start_from_last_chunk(values, model.split, mesh)

    def _step_of(self, plan: Plan, cache: KeyValueCache) -> CachedStep:
        """Return this rank's tokens of a plan. A prompt whose tokens all get scores is computed by every rank."""
        mesh, ids, names = self._model.mesh, plan.ids, plan.adapters
        segments = tuple(
            PromptSegment(
                item.slot,
                item.start,
                item.count,
                len(item.running.request.prompt_ids),
                None if item.scored else SegmentShare.where_it_pays(mesh.cp, item.count),
            )
            for item in plan.pieces
        )
        own = computed_tokens(len(plan.decoding), segments)
        adapters = self._adapters.chosen([names[place] for place in own], mesh.device)
        lengths = tuple(item.cached - 1 for item in plan.decoding)
        return CachedStep(cache, lengths, segments, adapters, tuple(ids[place] for place in own))

    def _with_scores(
        self, values: torch.Tensor, hidden: torch.Tensor, plan: Plan, segments: Sequence[PromptSegment]
    ) -> torch.Tensor:
        """Return values [R, C] and, as further rows, the scores of prompts, from all hidden states [1, T, H]."""
        begin, places, tokens = len(plan.decoding), list[int](), list[int]()
        for piece, segment in zip(plan.pieces, segments, strict=True):
            places += range(begin, begin + len(piece.scored))
            tokens += piece.scored
            begin += segment.computed
        width = max(values.shape[1], sampled_width([piece.running for piece in plan.pieces if piece.scored]))
        parts = [pad(values.to(hidden.device, torch.float64), (0, width - values.shape[1]))]
        every = on_device([torch.tensor(places), torch.tensor(tokens)], hidden.device)
        for rows, targets in zip(*(each.split(_SCORED_AT_ONCE) for each in every), strict=True):
            logits = self._model.stage.chunks[-1].logits(hidden[:, rows])[0]
            parts.append(scored_rows(logits, targets, width))
        return torch.cat(parts)

    def _collect(self) -> list[Sampled]:
        """Return the new tokens of the oldest forward; requests that have ended leave their slots."""
        launch = self._in_flight.popleft()
        sampled = []
        rows = launch.values().tolist()
        for running, values in zip(launch.scored, rows[len(launch.rows) :], strict=True):
            running.prompt_scores.append(
                TokenScore(int(values[0]), values[1], _alternatives(running, values))
            )
        for running, values in zip(launch.rows, rows[: len(launch.rows)], strict=True):
            if running not in launch.table.running:  # cancelled meanwhile
                continue
            if running.request.embeds:
                launch.table.leave(running)
                embedding = tuple(values[: self._model.shape.hidden_size])
                sampled.append(Sampled(running.number, -1, None, (), "stop", embedding))
                continue
            scores = _prompt_scores(running)
            if running.request.max_tokens == 0:
                launch.table.leave(running)
                sampled.append(Sampled(running.number, -1, None, (), "length", prompt_scores=scores))
                continue
            token = int(values[0])
            running.add(token)
            finish = _finish(running, token)
            if finish is not None:
                launch.table.leave(running)
            logprob = None if running.request.logprobs is None else values[1]
            top = _alternatives(running, values)
            sampled.append(Sampled(running.number, token, logprob, top, finish, prompt_scores=scores))
        return sampled


def _prompt_scores(running: Running) -> tuple[TokenScore, ...]:
    """Return the scores of a prompt at the first new token, which has them; later ones have none."""
    if not running.request.scores_prompt or running.new_tokens:
        return ()
    return (TokenScore(running.request.prompt_ids[0]), *running.prompt_scores)


def _alternatives(running: Running, values: list[float]) -> tuple[tuple[int, float], ...]:
    """Return the most likely tokens of a row of values, as many as the request asks for."""
    places = range(2, 2 + 2 * (running.request.logprobs or 0), 2)
    return tuple((int(values[at]), values[at + 1]) for at in places)


def _finish(running: Running, token: int) -> Finish | None:
    """Return why the token, the newest one, is the last one of its request; None: it is not."""
    if running.constraint is not None:
        # Without an allowed token the text cannot become whole.
        if not running.constraint.push(token):
            return "length"
        if running.constraint.complete:
            return "stop"
    elif token in running.request.stop_ids:
        return "stop"
    return "length" if running.new_tokens >= running.request.max_tokens else None
