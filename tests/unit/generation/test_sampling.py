"""How the next token is drawn, against transformers' own filters and against the probabilities."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megalite.generation.request import GREEDY, Sampling
from megalite.generation.sampling import next_token, probabilities, uniform
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


def test_greedy_takes_the_likeliest():
    assert next_token(torch.tensor([0.1, 3.0, 2.9]), GREEDY, 5) == 1


@pytest.mark.extended
def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws = [next_token(logits, Sampling(1.0, seed=3), position) for position in range(20_000)]
    for token, share in enumerate(logits.softmax(0).tolist()):
        assert_mean([draw == token for draw in draws], share, deviation=(share * (1 - share)) ** 0.5)


def test_what_is_left_out_is_never_drawn():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    assert {next_token(logits, Sampling(5.0, top_k=2), position) for position in range(300)} == {1, 2}
    assert {next_token(logits, Sampling(0.5, top_p=0.1), position) for position in range(300)} == {2}


def test_the_seed_and_the_position_decide():
    numbers = {(seed, position): uniform(seed, position) for seed in (1, 2) for position in range(50)}
    assert len(set(numbers.values())) == 100
    assert all(0 <= number < 1 for number in numbers.values())
    assert numbers[1, 7] == uniform(1, 7)
