"""How the next token is drawn, against transformers' own filters and against the probabilities."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megalite.generation import sampling
from megalite.generation.request import GREEDY, Request, Sampling
from megalite.generation.sampling import (
    changes_of,
    next_tokens,
    numbers_of,
    probabilities,
    sampled_rows,
    uniform,
)
from megalite.generation.slots import Running
from tests.support.parity import OPERATOR_RTOL, assert_close, assert_mean


def chances_of(logits: Tensor, settings: Sampling) -> Tensor:
    """Return the probabilities [V] of logits [V]."""
    return probabilities(logits[None], [settings], numbers_of([settings], [0], len(logits)))[0]


def running(
    settings: Sampling, prompt: Sequence[int] = (1,), new: Sequence[int] = (), **asked: Any
) -> Running:
    row = Running(0, Request(tuple(prompt), 5, settings, frozenset(), **asked))
    for token in new:
        row.add(token)
    return row


def changed(logits: Tensor, row: Running) -> Tensor:
    return changes_of([row], logits).applied_to(logits)


def drawn(logits: Tensor, settings: Sampling, count: int) -> list[int]:
    """Return the tokens drawn from logits [V] at `count` positions."""
    rows = [settings] * count
    numbers = numbers_of(rows, range(count), len(logits))
    return next_tokens(logits.expand(count, -1), rows, numbers).tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.95, 1.0])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    logits = torch.randn(101, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    theirs = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = chances_of(logits, Sampling(temperature, top_k, top_p))
    expected = theirs.softmax(-1)[0]
    kept = expected > 0
    assert torch.equal(ours > 0, kept)
    # In logarithms, so that the small ones count as much as the large.
    assert_close(ours[kept].log(), expected[kept].log(), rtol=OPERATOR_RTOL)


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("ties", [False, True])
def test_top_p_of_a_large_vocabulary_is_that_of_a_whole_sort(monkeypatch, spread, top_p, ties):
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * spread
    logits = logits.mul(2).round().div(2) if ties else logits
    found = chances_of(logits, Sampling(1.0, top_p=top_p))
    monkeypatch.setattr(sampling, "_FIRST", ())
    assert torch.equal(found, chances_of(logits, Sampling(1.0, top_p=top_p)))


def test_greedy_takes_the_likeliest():
    assert sampled_rows(torch.tensor([[0.1, 3.0, 2.9]]), [running(GREEDY)]).tolist() == [[1, 0]]


@pytest.mark.extended
def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws = drawn(logits, Sampling(1.0, seed=3), 20_000)
    for token, share in enumerate(logits.softmax(0).tolist()):
        assert_mean([draw == token for draw in draws], share, deviation=(share * (1 - share)) ** 0.5)


def test_what_is_left_out_is_never_drawn():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    assert set(drawn(logits, Sampling(5.0, top_k=2), 300)) == {1, 2}
    assert set(drawn(logits, Sampling(0.5, top_p=0.1), 300)) == {2}


def test_the_seed_and_the_position_decide():
    numbers = {(seed, position): uniform(seed, position) for seed in (1, 2) for position in range(50)}
    assert len(set(numbers.values())) == 100
    assert all(0 <= number < 1 for number in numbers.values())
    assert numbers[1, 7] == uniform(1, 7)


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("top_p", [0.7, 1.0])
def test_min_p_is_that_of_transformers(min_p, top_p):
    logits = torch.randn(101, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2
    theirs = TopPLogitsWarper(top_p)(None, TemperatureLogitsWarper(0.7)(None, logits[None]))
    expected = MinPLogitsWarper(min_p)(None, theirs).softmax(-1)[0]
    ours = chances_of(logits, Sampling(0.7, top_p=top_p, min_p=min_p))
    assert torch.equal(ours > 0, expected > 0)
    assert_close(ours, expected, rtol=OPERATOR_RTOL)


def test_top_p_of_one_row_is_not_that_of_another() -> None:
    """The unlikeliest tokens have less than a rounding of 1, and a row with top_p 1 keeps them."""
    logits, settings = torch.tensor([[60.0, 20.0, 0.0]] * 2), [Sampling(1.0), Sampling(1.0, top_p=0.5)]
    together = probabilities(logits, settings, numbers_of(settings, [0, 0], 3))
    assert torch.equal(together[0], chances_of(logits[0], settings[0])) and together[0].all()
    assert together[1].tolist() == [1, 0, 0]


def test_the_repetition_penalty_is_that_of_transformers():
    logits = torch.randn(1, 101, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ids = [5, 9, 9, 40, 7, 7, 100]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), logits.clone())[0]
    ours = changed(logits, running(Sampling(repetition_penalty=1.7), ids[:3], ids[3:]))
    assert torch.equal(ours[0], theirs)


def test_presence_and_frequency_count_new_tokens_only():
    """The formula of the OpenAI API: logit - occurrences * frequency - (occurs) * presence."""
    logits, penalties = torch.zeros(1, 8), Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    ours = changed(logits, running(penalties, [1, 2], [2, 2, 2, 5]))
    assert ours.tolist() == [[0, 0, -1.25, 0, 0, -0.75, 0, 0]]
    assert not logits.any(), "the logits of the model stay as they are"


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 101, generator=generator)
    kinds = [
        GREEDY,
        Sampling(0.9, top_p=0.8),
        Sampling(1.3, top_k=9, min_p=0.05, seed=2),
        Sampling(0.0, seed=4),
    ]
    kinds += [Sampling(0.0, repetition_penalty=3.0), Sampling(1.0, frequency_penalty=1.5)]
    rows = [
        Running(number, Request((3, 4, number), 5, kind, frozenset(), logprobs=number % 3 or None))
        for number, kind in enumerate(kinds)
    ]
    for row in rows:
        row.add(int(logits[row.number].argmax()))
    together = sampled_rows(logits, rows)
    for number, row in enumerate(rows):
        alone = sampled_rows(logits[number : number + 1], [row])[0]
        assert torch.equal(together[number, : len(alone)], alone)
    assert together[0, 0] == logits[0].argmax() and together[4, 0] != logits[4].argmax()
    assert_close(together[1, 1], logits[1].double().log_softmax(0)[int(together[1, 0])], rtol=OPERATOR_RTOL)
    best = logits[2].topk(2).indices.tolist()
    assert together[2, 2::2].tolist() == best


def row_by_row(logits: Tensor, row: Running) -> int:
    """Sample one token as the definitions say, without a batch and without a shortcut."""
    sampling, counts = row.request.sampling, row.counts
    own = logits.clone()
    for token in set(row.prompt) | counts.keys() if sampling.repetition_penalty != 1 else ():
        factor = sampling.repetition_penalty
        own[token] = own[token] * factor if own[token] < 0 else own[token] / factor
    for token, times in counts.items():
        own[token] += -(sampling.presence_penalty + sampling.frequency_penalty * torch.tensor(float(times)))
    if row.constraint is not None:
        allowed = row.constraint.allowed()
        own[[token >= len(allowed) or not allowed[token] for token in range(len(own))]] = -torch.inf
    if sampling.temperature == 0:
        return int(own.argmax())
    scaled = own.double() / sampling.temperature
    if 0 < sampling.top_k < len(own):
        scaled[scaled < scaled.sort().values[-sampling.top_k]] = -torch.inf
    chances = scaled.softmax(0)
    if sampling.top_p < 1:
        before = 0.0
        for place, token in enumerate(chances.sort(descending=True, stable=True).indices.tolist()):
            chance = float(chances[token])
            if place and before >= sampling.top_p:
                chances[token] = 0
            before += chance
    chances[chances < sampling.min_p * chances.max()] = 0
    share = uniform(sampling.seed, len(row.ids)) * float(chances.sum())
    for token, chance in enumerate(chances.tolist()):
        share -= chance
        if share < 0:
            return token
    raise AssertionError("no token was drawn")


class Allowed:
    """A constraint of `sampled_rows` alone."""

    def __init__(self, allowed: bytearray):
        self.allowed = lambda: allowed


def random_row(draw: random.Random, vocabulary: int) -> Running:
    settings = Sampling(
        temperature=draw.choice([0.0, 0.7, 1.0, 1.6]),
        top_k=draw.choice([0, 1, 6, vocabulary, vocabulary + 3]),
        top_p=draw.choice([0.05, 0.8, 1.0]),
        min_p=draw.choice([0.0, 0.2]),
        seed=draw.randrange(99),
        repetition_penalty=draw.choice([1.0, 1.0, 0.8, 1.4]),
        presence_penalty=draw.choice([0.0, 0.5]),
        frequency_penalty=draw.choice([0.0, -0.25]),
    )
    prompt, new = ([draw.randrange(vocabulary) for _ in range(count)] for count in (5, draw.randrange(6)))
    row = running(settings, prompt, new)
    if draw.random() < 0.3:
        row.constraint = Allowed(bytearray(token % 3 != 1 for token in range(vocabulary - 2)))  # type: ignore[assignment]
    return row


@pytest.mark.parametrize("ties", [False, True])
def test_a_batch_has_the_tokens_of_its_rows_one_after_the_other(ties: bool) -> None:
    draw = random.Random(3)
    for seed in range(40):
        logits = torch.randn(8, 61, generator=torch.Generator().manual_seed(seed)) * 3
        logits = logits.round() if ties else logits
        rows = [random_row(draw, 61) for _ in logits]
        assert sampled_rows(logits, rows)[:, 0].tolist() == [
            row_by_row(*each) for each in zip(logits, rows, strict=True)
        ]


class Launches(TorchDispatchMode):
    """Counts the operators that compute, and the elements of their largest float64 result."""

    count, most = 0, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.count += not operator.is_view
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.dtype == torch.float64 and not operator.is_view:
                self.most = max(self.most, each.numel())
        return result


def launched(rows: int, settings: Sampling) -> Launches:
    """Sample rows of 128,256 logits as a device does; meta tensors take its path."""
    with Launches() as launches:
        tokens = next_tokens(
            torch.empty(rows, 128_256, device="meta"),
            [settings] * rows,
            torch.empty(5, rows, 1, dtype=torch.float64, device="meta"),
        )
    assert tokens.shape == (rows,)
    return launches


def test_more_rows_are_no_more_launches() -> None:
    """On a device, where a loop over 16 rows would be hundreds of launches."""
    few, many = (launched(rows, Sampling(0.9, top_k=40, top_p=0.9, min_p=0.01)).count for rows in (2, 16))
    assert few == many < 40


@pytest.mark.parametrize("settings", [Sampling(0.9), Sampling(0.9, top_k=40, top_p=0.9, min_p=0.01)])
def test_many_rows_take_no_more_memory_of_a_device(settings: Sampling) -> None:
    """256 rows at once would take 263 MB for each of several temporaries."""
    assert 16 * 128_256 <= launched(256, settings).most <= 1 << 22


@pytest.mark.parametrize("at_once", [1, 61, 200])
def test_rows_in_parts_have_the_tokens_and_scores_of_all_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    draw = random.Random(7)
    logits = torch.randn(32, 61, generator=torch.Generator().manual_seed(8)) * 3
    rows = [random_row(draw, 61) for _ in logits]
    for number, row in enumerate(rows):
        row.request = replace(row.request, logprobs=number % 4 or None)
    together = sampled_rows(logits, rows)
    computed = []
    scored = sampling.scored_rows
    monkeypatch.setattr(
        sampling, "scored_rows", lambda some, *rest: computed.append(len(some)) or scored(some, *rest)
    )
    monkeypatch.setattr(sampling, "_AT_ONCE", at_once)
    assert torch.equal(sampled_rows(logits, rows), together)
    assert sum(computed) == 24 and max(computed) == max(1, at_once // 61)
