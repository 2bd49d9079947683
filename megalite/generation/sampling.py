"""Choose the next token from logits: pure functions of the logits, the request and a counter-based random number.

Each row is computed by itself, so that a token depends neither on the batch nor on the layout.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalite.generation.request import Sampling
from megalite.generation.slots import Running
from megalite.ops.counter import philox_words
from megalite.parallel.random import key_of

# How many of the most likely tokens are tried for top-p, before the whole vocabulary.
_FIRST = (1024, 16384)
# Sums of the same float64 probabilities in another order differ by less.
_SUM_ERROR = 1e-9


def sampled_width(rows: Sequence[Running]) -> int:
    """Return the number of columns of `sampled_rows`."""
    return 2 + 2 * max((row.request.logprobs or 0 for row in rows), default=0)


def sampled_rows(logits: Tensor, rows: Sequence[Running]) -> Tensor:
    """Sample a token for each row of logits [R, V], without a device sync: float64 [R, 2 + 2 n].

    Columns: the token, its log probability, then n alternatives and their log probabilities, n the most that a row
    asks for. Log probabilities are those of the model, before penalties and temperature; zeros where not asked for.
    """
    columns = torch.zeros(len(rows), sampled_width(rows), dtype=torch.float64, device=logits.device)
    plain = [not row.request.sampling.penalises for row in rows]
    if any(row.request.sampling.temperature == 0 for row in rows):
        columns[:, 0] = logits.argmax(dim=-1)
    for place, row in enumerate(rows):
        sampling = row.request.sampling
        if sampling.temperature != 0 or not plain[place] or row.constraint is not None:
            own = (
                logits[place] if plain[place] else penalised(logits[place], sampling, row.prompt, row.counts)
            )
            if row.constraint is not None:
                own = _constrained(own, row.constraint.allowed())
            columns[place, 0] = next_token(own, sampling, len(row.ids))
        if row.request.logprobs is not None:
            _add_log_probabilities(columns[place], logits[place], row.request.logprobs)
    return columns


def scored_rows(logits: Tensor, tokens: Tensor, width: int) -> Tensor:
    """Return the rows of `sampled_rows` for the tokens [R] and their logits [R, V]: float64 [R, width]."""
    rows = torch.zeros(len(tokens), width, dtype=torch.float64, device=logits.device)
    logs = logits.double().log_softmax(-1)
    rows[:, 0], rows[:, 1] = tokens, logs.gather(1, tokens[:, None])[:, 0]
    values, likely = logs.topk(min((width - 2) // 2, logs.shape[1]))
    end = 2 + 2 * values.shape[1]
    rows[:, 2:end:2], rows[:, 3:end:2] = likely.double(), values
    return rows


def penalised(logits: Tensor, sampling: Sampling, prompt: frozenset[int], new: Mapping[int, int]) -> Tensor:
    """Return logits [V] after the repetition, presence and frequency penalties.

    prompt: the different tokens of the prompt. new: new token -> occurrences.
    """
    logits = logits.clone()
    if sampling.repetition_penalty != 1:
        tokens = sorted(prompt | new.keys())
        seen = torch.tensor(tokens, dtype=torch.int64).to(logits.device)
        own = logits[seen]
        factor = sampling.repetition_penalty
        logits[seen] = torch.where(own < 0, own * factor, own / factor)
    if new and (sampling.presence_penalty or sampling.frequency_penalty):
        logits.index_add_(0, *_subtracted(new, sampling, logits))
    return logits


def _subtracted(new: Mapping[int, int], sampling: Sampling, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new tokens [n] and what the presence and frequency penalties add to their logits [n]."""
    tokens = torch.tensor(list(new), dtype=torch.int64)
    times = torch.tensor(list(new.values()), dtype=logits.dtype)
    added = -(sampling.presence_penalty + sampling.frequency_penalty * times)
    return tokens.to(logits.device), added.to(logits.device)


def _constrained(logits: Tensor, allowed: bytearray) -> Tensor:
    """Return logits [V], -inf where `allowed`, a byte for each token, is 0 or ends."""
    excluded = torch.ones(len(logits), dtype=torch.bool)
    forbidden = torch.frombuffer(allowed, dtype=torch.uint8)[: len(logits)] == 0
    excluded[: len(forbidden)] = forbidden
    return logits.masked_fill(excluded.to(logits.device), -torch.inf)


def next_token(logits: Tensor, sampling: Sampling, position: int) -> Tensor:
    """Return the token [] at `position`, sampled from the logits [V], on their device."""
    if sampling.temperature == 0:
        return logits.argmax()
    cumulated = probabilities(logits, sampling).cumsum(0)
    drawn = uniform(sampling.seed, position) * cumulated[-1]
    return torch.searchsorted(cumulated, drawn, right=True).clamp(max=len(cumulated) - 1)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return float64 probabilities [V] for logits [V], after temperature, top-k, top-p and min-p; excluded tokens
    have 0."""
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        least = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    chances = scaled.softmax(0)
    if sampling.top_p < 1:
        ordered, order = _most_likely(chances, sampling.top_p)
        # Exclude a token if the more likely ones already reach top_p; the most likely token always stays.
        beyond = ordered.cumsum(0) - ordered >= sampling.top_p
        beyond[0] = False
        chances = torch.zeros_like(chances).scatter(0, order, ordered.masked_fill(beyond, 0))
    if sampling.min_p > 0:
        chances = chances.masked_fill(chances < sampling.min_p * chances.max(), 0)
    return chances / chances.sum()


def _most_likely(chances: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens of chances [V], in order, as many as reach top_p at least: chances and tokens."""
    # A sort of the whole vocabulary takes ten times as long; on a GPU it costs less than to ask for the sum.
    for most in _FIRST if chances.device.type == "cpu" else ():
        if most >= len(chances):
            break
        least = chances.topk(most).values[-1]
        tokens = (chances >= least).nonzero().squeeze(1)
        ordered, order = chances[tokens].sort(descending=True, stable=True)
        if ordered.sum() >= top_p + _SUM_ERROR:
            return ordered, tokens[order]
    return chances.sort(descending=True, stable=True)


def uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1) that depends only on seed and position."""
    return philox_words((position, 0, 0, 0), key_of(seed, "generate"))[0] * 2.0**-32


def _add_log_probabilities(row: Tensor, logits: Tensor, alternatives: int) -> None:
    """Write the log probabilities of the token row[0] and its alternatives into a row of `sampled_rows`."""
    logs = logits.double().log_softmax(0)
    row[1] = logs.gather(0, row[:1].long())[0]
    if alternatives:
        values, tokens = logs.topk(min(alternatives, len(logs)))
        row[2 : 2 + 2 * len(tokens) : 2], row[3 : 3 + 2 * len(tokens) : 2] = tokens.double(), values
