"""Beam search: which settings are refused, which hypotheses end the search, and slots that change places."""

from dataclasses import replace

import pytest
import torch

from megalite.errors import ConfigError
from megalite.generation.beams import Beams, BeamSettings, Candidate, beam_problems, check_beams
from megalite.generation.request import GREEDY, Request, Sampling
from megalite.model.kv_cache import KeyValueCache, Room
from tests.support.tiny import tiny_shape

END = 7
REQUEST = Request((1, 2), 5, GREEDY, frozenset({END}))


def test_problems_name_the_setting_and_the_remedy() -> None:
    def flag(setting: str) -> str:
        return f"--{setting.replace('_', '-')}"

    def told(*values, **others) -> list[str]:
        return [f"{each.key}: {each.message}" for each in beam_problems(*values, flag, **others)]

    assert told(1, None, Sampling(0.7), stop=["a"], logprobs=2) == [] == told(4, -0.5, GREEDY)
    assert told(0, None, GREEDY) == ["--beams: 0 is no number of beams"]
    assert told(1, 2.0, GREEDY) == ["--length-penalty: has no effect without beam search"]
    for wrong in (float("nan"), float("inf"), -5.5):
        assert told(2, wrong, GREEDY) == [f"--length-penalty: {wrong:g} is not a length penalty"]
    many = Sampling(0.5, repetition_penalty=1.1, presence_penalty=1, frequency_penalty=1)
    assert told(2, 1.0, many, stop=["a"], logprobs=0) == [
        f"--{name}: is not for beam search"
        for name in (
            "temperature",
            "repetition-penalty",
            "presence-penalty",
            "frequency-penalty",
            "stop",
            "logprobs",
        )
    ]


def test_a_request_needs_candidates_in_the_vocabulary_and_no_sampling() -> None:
    check_beams(BeamSettings(50), REQUEST, tiny_shape())
    assert Beams(BeamSettings(4), replace(REQUEST, stop_ids=frozenset({END, 8}))).candidates == 12
    with pytest.raises(ConfigError, match=r"beams: 51 beams need 102 candidates.*101 tokens; use at most 50"):
        check_beams(BeamSettings(51), REQUEST, tiny_shape())
    with pytest.raises(ConfigError, match="temperature: is not for beam search"):
        check_beams(BeamSettings(2), replace(REQUEST, sampling=Sampling(1.0)), tiny_shape())


def test_the_search_ends_when_no_running_hypothesis_is_better() -> None:
    beams = Beams(BeamSettings(2, 0.0), REQUEST)
    assert beams.candidates == 4
    first = [Candidate(-1.0, 0, 3), Candidate(-1.5, 0, END), Candidate(-2.0, 0, 4), Candidate(-3.0, 0, 5)]
    assert beams.advance(first) == [0, 0] and not beams.done
    assert [each.tokens for each in beams.running] == [(3,), (4,)]
    # The third candidate may not end, though it is an end token.
    second = [Candidate(-1.1, 0, 9), Candidate(-2.5, 1, 9), Candidate(-2.6, 0, END), Candidate(-2.7, 1, 3)]
    assert beams.advance(second) == [0, 1] and not beams.done
    third = [Candidate(-1.2, 0, END), Candidate(-1.4, 0, 4), Candidate(-2.6, 1, 4), Candidate(-2.8, 1, END)]
    assert beams.advance(third) == [0, 1] and not beams.done, "-1.4 is better than -1.5"
    fourth = [Candidate(-1.6, 0, 3), Candidate(-2.8, 1, 3), Candidate(-3.0, 1, 4), Candidate(-3.1, 0, 4)]
    beams.advance(fourth)
    assert beams.done and beams.best.tokens == (3, 9, END) and beams.best.score == -1.2


def test_slots_change_places_with_and_without_virtual_tokens() -> None:
    cache = KeyValueCache(Room(4, 6), tiny_shape(), [0, 3], 2, torch.float32, torch.device("cpu"))
    cache.prefix = 2
    generator = torch.Generator().manual_seed(5)
    for layer in (0, 3):
        cache.of(layer).copy_(torch.rand(cache.of(layer).shape, generator=generator))
    before = cache.of(3).clone()
    cache.reorder([2, 1, 0], 1, 3)
    assert torch.equal(cache.of(3)[:, [2, 1, 0, 3], :, 3:5], before[:, :, :, 3:5])
    assert torch.equal(cache.of(3)[:, :, :, :3], before[:, :, :, :3])
    assert torch.equal(cache.of(3)[:, :, :, 5:], before[:, :, :, 5:])
    before = cache.of(0).clone()
    cache.reorder([3, 3, 3, 3], 0, 4)
    assert torch.equal(cache.of(0)[..., :6, :], before[:, 3:, :, :6].expand(-1, 4, -1, -1, -1))
