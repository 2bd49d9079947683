"""Choose the next tokens from logits, by counter-based random numbers; embed texts from hidden states.

All rows are computed at once, each as if it were alone: a token depends neither on the batch nor on the layout.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from megalite.generation.request import Sampling
from megalite.generation.slots import Running
from megalite.ops.counter import philox_words
from megalite.parallel.host_copies import on_device
from megalite.parallel.random import key_of

# How many of the most likely tokens are tried for top-p, before the whole vocabulary.
_FIRST = (1024, 16384)
# Sums of the same float64 probabilities in another order differ by less.
_SUM_ERROR = 1e-9
# Logits that are computed at once, in float64. On a CPU larger temporaries leave its cache, and cost twice the time.
# On an accelerator fewer would be more launches; several temporaries of 32 MiB fit beside the cache of keys and values.
_AT_ONCE = 1 << 17
_AT_ONCE_ON_A_CARD = 1 << 22


def sampled_width(rows: Sequence[Running]) -> int:
    """Return the number of columns of `sampled_rows`."""
    return 2 + 2 * max((row.request.logprobs or 0 for row in rows), default=0)


def sampled_rows(logits: Tensor, rows: Sequence[Running]) -> Tensor:
    """Sample a token for each row of logits [R, V], without a device sync: float64 [R, 2 + 2 n].

    Columns: the token, its log probability, then n alternatives and their log probabilities, n the most that a row
    asks for. Log probabilities are those of the model, before penalties and temperature; zeros where not asked for.
    """
    changing = any(row.request.sampling.penalises or row.constraint is not None for row in rows)
    changes = changes_of(rows, logits) if changing else ()
    drawn = [place for place, row in enumerate(rows) if row.request.sampling.temperature != 0]
    settings = [rows[place].request.sampling for place in drawn]
    numbers = numbers_of(settings, [len(rows[place].ids) for place in drawn], logits.shape[1])
    asked = defaultdict[int, list[int]](list)
    for place, row in enumerate(rows):
        if row.request.logprobs is not None:
            asked[row.request.logprobs].append(place)
    # All that the host knows goes to the device in one copy.
    draws = [numbers, torch.tensor(drawn)] if drawn else []
    given = iter(on_device([*changes, *draws, *map(torch.tensor, asked.values())], logits.device))
    changed = LogitChanges(*islice(given, len(changes))).applied_to(logits) if changing else logits
    columns = torch.zeros(len(rows), sampled_width(rows), dtype=torch.float64, device=logits.device)
    if len(drawn) < len(rows):
        columns[:, 0] = changed.argmax(dim=-1)
    if drawn:
        numbers, places = islice(given, 2)
        chosen = changed[places] if len(drawn) < len(rows) else changed
        columns[places, 0] = next_tokens(chosen, settings, numbers).double()
    for alternatives, own in zip(asked, given, strict=True):
        width = 2 + 2 * alternatives
        for some in own.split(_rows_at_once(logits)):
            columns[some, :width] = scored_rows(logits[some], columns[some, 0].long(), width)
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


class LogitChanges(NamedTuple):
    """The changes of the logits [R, V] before a token is chosen; flat: places in the R V logits.

    seen [n], factors [n]: flat, logits that the repetition penalty divides if positive, else multiplies. new [m],
    added [m]: flat, and what the presence and frequency penalties add. constrained [c], excluded [c, V]: rows, and
    True for tokens that they must not have.
    """

    seen: Tensor
    factors: Tensor
    new: Tensor
    added: Tensor
    constrained: Tensor
    excluded: Tensor

    def applied_to(self, logits: Tensor) -> Tensor:
        """Return the changed logits; `logits` stay as they are."""
        changed = logits.clone(memory_format=torch.contiguous_format)
        flat = changed.view(-1)
        if self.seen.numel():
            own = flat[self.seen]
            flat[self.seen] = torch.where(own < 0, own * self.factors, own / self.factors)
        if self.new.numel():
            flat.index_add_(0, self.new, self.added)
        if self.constrained.numel():
            changed[self.constrained] = changed[self.constrained].masked_fill(self.excluded, -torch.inf)
        return changed


def changes_of(rows: Sequence[Running], logits: Tensor) -> LogitChanges:
    """Return what requests change of their logits [R, V], on the host."""
    seen, factors, new, penalties = list[int](), list[float](), list[int](), list[tuple[float, float, int]]()
    vocabulary = logits.shape[1]
    for place, row in enumerate(rows):
        sampling, start = row.request.sampling, place * vocabulary
        if (factor := sampling.repetition_penalty) != 1:
            tokens = row.prompt | row.counts.keys()
            seen += (start + token for token in tokens)
            factors += [factor] * len(tokens)
        if sampling.presence_penalty or sampling.frequency_penalty:
            new += (start + token for token in row.counts)
            both = sampling.presence_penalty, sampling.frequency_penalty
            penalties += ((*both, times) for times in row.counts.values())
    presence, frequency, times = torch.tensor(penalties, dtype=logits.dtype).view(-1, 3).unbind(1)
    constraints = {place: row.constraint for place, row in enumerate(rows) if row.constraint is not None}
    excluded = torch.ones(len(constraints), vocabulary, dtype=torch.bool)
    for own, constraint in zip(excluded, constraints.values(), strict=True):
        # A byte for each token, 0 if it is excluded; those behind its end are too.
        allowed = torch.frombuffer(constraint.allowed(), dtype=torch.uint8)[:vocabulary]
        own[: len(allowed)] = allowed == 0
    return LogitChanges(
        torch.tensor(seen, dtype=torch.int64),
        torch.tensor(factors, dtype=logits.dtype),
        torch.tensor(new, dtype=torch.int64),
        -(presence + frequency * times),
        torch.tensor(list(constraints), dtype=torch.int64),
        excluded,
    )


def numbers_of(settings: Sequence[Sampling], positions: Sequence[int], vocabulary: int) -> Tensor:
    """Return what `next_tokens` needs of the R rows of a step, on the host: float64 [5, R, 1].

    Temperature, top_k (0: all tokens), top_p, min_p, and the random number in [0, 1) of the row's seed and position.
    """
    rows = [
        (
            each.temperature,
            each.top_k if each.top_k < vocabulary else 0,
            each.top_p,
            each.min_p,
            uniform(each.seed, at),
        )
        for each, at in zip(settings, positions, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(-1, 5).t().unsqueeze(2)


def next_tokens(logits: Tensor, settings: Sequence[Sampling], numbers: Tensor) -> Tensor:
    """Return tokens [R] sampled from the logits [R, V], on their device. numbers: `numbers_of` the settings."""
    at_once, tokens = _rows_at_once(logits), []
    for start in range(0, len(settings), at_once):
        rows = slice(start, start + at_once)
        cumulated = probabilities(logits[rows], settings[rows], numbers[:, rows]).cumsum(1)
        drawn = numbers[4, rows] * cumulated[:, -1:]
        tokens.append(torch.searchsorted(cumulated, drawn, right=True).clamp(max=cumulated.shape[1] - 1))
    return torch.cat(tokens).squeeze(1)


def _rows_at_once(logits: Tensor) -> int:
    most = _AT_ONCE if logits.device.type == "cpu" else _AT_ONCE_ON_A_CARD
    return max(1, most // logits.shape[1])


def probabilities(logits: Tensor, settings: Sequence[Sampling], numbers: Tensor) -> Tensor:
    """Return float64 probabilities [R, V] for logits [R, V], after temperature, top-k, top-p and min-p; excluded
    tokens have 0. numbers: `numbers_of` the settings."""
    temperature, top_k, top_p, min_p, _ = numbers
    scaled = logits.double() / temperature
    if most := max((each.top_k for each in settings if each.top_k < logits.shape[1]), default=0):
        likely = scaled.topk(most).values
        least = likely.gather(1, (top_k.long() - 1).clamp(min=0))
        scaled = scaled.masked_fill((scaled < least) & (top_k > 0), -torch.inf)
    chances = scaled.softmax(1)
    if any(each.top_p < 1 for each in settings):
        ordered, order = _most_likely(chances, top_p)
        # Exclude a token if the more likely ones already reach top_p; the most likely token always stays.
        beyond = ordered.cumsum(1) - ordered >= top_p
        beyond[:, 0] = False
        cut = torch.zeros_like(chances).scatter(1, order, ordered.masked_fill(beyond, 0))
        chances = torch.where(top_p < 1, cut, chances)
    if any(each.min_p > 0 for each in settings):
        chances = chances.masked_fill(chances < min_p * chances.amax(1, keepdim=True), 0)
    return chances / chances.sum(1, keepdim=True)


def _most_likely(chances: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens of chances [R, V], in order, as many as reach top_p [R, 1] below 1 at least:
    chances and tokens, [R, n] each."""
    # A sort of the whole vocabulary takes ten times as long; on a GPU it costs less than to ask for the sum.
    for most in _FIRST if chances.device.type == "cpu" else ():
        if most >= chances.shape[1]:
            break
        least = chances.topk(most).values[:, -1:]
        # All or none of equally likely tokens, in order, as in a sort of the whole vocabulary.
        tokens = (chances >= least).any(0).nonzero().squeeze(1)
        ordered, order = chances[:, tokens].sort(dim=1, descending=True, stable=True)
        if ((ordered * (ordered >= least)).sum(1, keepdim=True) >= top_p + _SUM_ERROR)[top_p < 1].all():
            return ordered, tokens[order]
    return chances.sort(dim=1, descending=True, stable=True)


def uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1) that depends only on seed and position."""
    return philox_words((position, 0, 0, 0), key_of(seed, "generate"))[0] * 2.0**-32


def width_with_embeddings(width: int, rows: Sequence[Running], hidden_size: int) -> int:
    """Return the number of columns of `with_embeddings`. width: without embeddings."""
    return max(width, hidden_size) if any(row.request.embeds for row in rows) else width


def with_embeddings(values: Tensor, hidden_states: Tensor, rows: Sequence[Running]) -> Tensor:
    """Return values [R, C] of `sampled_rows`, in which a row that embeds has its embedding [H] instead, then zeros.

    hidden_states: [R, H] of the last tokens after the final norm. An embedding has length 1; there is no other pooling.
    """
    padded = pad(values, (0, max(0, hidden_states.shape[1] - values.shape[1])))
    [places] = on_device([torch.tensor([row.request.embeds for row in rows])], values.device)
    # Not in bfloat16, whose sum of squares is off by a hundredth.
    vectors = normalize(hidden_states.float(), dim=-1).to(padded.dtype)
    # No masked copy: it would wait for the device.
    return torch.where(places[:, None], pad(vectors, (0, padded.shape[1] - vectors.shape[1])), padded)
