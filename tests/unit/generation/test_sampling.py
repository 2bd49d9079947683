"""How the next token is drawn, against transformers' own filters and against the probabilities."""

from collections import Counter

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megalite.generation import sampling
from megalite.generation.request import GREEDY, Request, Sampling
from megalite.generation.sampling import next_token, penalised, probabilities, sampled_rows, uniform
from megalite.generation.slots import Running
from tests.support.parity import OPERATOR_RTOL, assert_close, assert_mean


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
    ours = probabilities(logits, Sampling(temperature, top_k, top_p))
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
    found = probabilities(logits, Sampling(1.0, top_p=top_p))
    monkeypatch.setattr(sampling, "_FIRST", ())
    assert torch.equal(found, probabilities(logits, Sampling(1.0, top_p=top_p)))


def test_greedy_takes_the_likeliest():
    assert next_token(torch.tensor([0.1, 3.0, 2.9]), GREEDY, 5) == 1


@pytest.mark.extended
def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws = [int(next_token(logits, Sampling(1.0, seed=3), position)) for position in range(20_000)]
    for token, share in enumerate(logits.softmax(0).tolist()):
        assert_mean([draw == token for draw in draws], share, deviation=(share * (1 - share)) ** 0.5)


def test_what_is_left_out_is_never_drawn():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    assert {int(next_token(logits, Sampling(5.0, top_k=2), position)) for position in range(300)} == {1, 2}
    assert {int(next_token(logits, Sampling(0.5, top_p=0.1), position)) for position in range(300)} == {2}


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
    ours = probabilities(logits, Sampling(0.7, top_p=top_p, min_p=min_p))
    assert torch.equal(ours > 0, expected > 0)
    assert_close(ours, expected, rtol=OPERATOR_RTOL)


def test_the_repetition_penalty_is_that_of_transformers():
    logits = torch.randn(1, 101, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ids = [5, 9, 9, 40, 7, 7, 100]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), logits.clone())[0]
    ours = penalised(logits[0], Sampling(repetition_penalty=1.7), frozenset(ids[:3]), Counter(ids[3:]))
    assert torch.equal(ours, theirs)


def test_presence_and_frequency_count_new_tokens_only():
    """The formula of the OpenAI API: logit - occurrences * frequency - (occurs) * presence."""
    logits, new = torch.zeros(8), Counter([2, 2, 2, 5])
    ours = penalised(logits, Sampling(presence_penalty=0.5, frequency_penalty=0.25), frozenset({1, 2}), new)
    assert ours.tolist() == [0, 0, -1.25, 0, 0, -0.75, 0, 0]
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
