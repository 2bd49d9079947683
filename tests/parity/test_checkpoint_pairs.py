"""A layout resumes from another layout's checkpoint; `python -m tests.parity.run_checkpoint_pairs` runs every pair."""

import pytest

from tests.support.checkpoint_pairs import (
    EVERY_PAIR,
    EXPERTS,
    LAYOUTS,
    PRECISION_PAIRS,
    PRECISIONS,
    Pairs,
    pairs_for_every_change,
    world_size,
)

CHOSEN = pairs_for_every_change()
# Tensor, pipeline, context and data ranks, chunks, ZeRO and an offload write and read; two read what they wrote
# themselves.
CORE = {
    ("dp2 zero1", "tp2 dp2 zero3"),
    ("tp2 dp2 zero3", "pp2 dp2 zero1 offload"),
    ("pp2 virtual", "cp2 dp2 zero2"),
    ("cp2", "dp2"),
    ("cp2 dp2 zero2", "dp2 zero1"),
    ("pp2 dp2 zero1 offload", "tp4"),
    ("tp2", "tp2"),
    ("dp2 zero3 offload", "dp2 zero3 offload"),
}
# Into 16 bits and back, and from one 16-bit type to the other.
CHOSEN_PRECISIONS = [
    ("fp32 one process", "bf16 dp2 zero1"),
    ("bf16 dp2 zero1", "fp32 one process"),
    ("fp16 one process", "fp16 one process"),
]


@pytest.fixture(scope="module")
def pairs(ranks, tmp_path_factory):
    return Pairs(ranks, tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def precisions(ranks, tmp_path_factory):
    return Pairs(ranks, tmp_path_factory.mktemp("precisions"), PRECISIONS)


@pytest.fixture(scope="module")
def mixtures(ranks, tmp_path_factory):
    return Pairs(ranks, tmp_path_factory.mktemp("mixtures"), EXPERTS)


def test_the_chosen_pairs_have_every_layout_on_both_sides():
    assert len(set(CHOSEN)) == 27 and CORE < set(CHOSEN) < set(EVERY_PAIR) and len(LAYOUTS) >= 12
    small = {name for name, settings in LAYOUTS.items() if world_size(settings) <= 4}
    assert LAYOUTS.keys() - small == {"tp2 pp2 dp2 zero1"}
    for side in (0, 1):
        assert {pair[side] for pair in CHOSEN if pair[0] != pair[1]} == small


def _params(every, chosen, core):
    marks = {pair: pytest.mark.extended if pair in chosen else pytest.mark.slow for pair in every}
    marks |= dict.fromkeys(core, ())
    return [pytest.param(*pair, marks=marks[pair], id=" to ".join(pair)) for pair in every]


@pytest.mark.parametrize(("writer", "reader"), _params(EVERY_PAIR, CHOSEN, CORE))
def test_a_run_goes_on_in_another_layout(pairs, writer, reader):
    assert pairs.run(writer, reader).problems == []


@pytest.mark.parametrize(("writer", "reader"), _params(PRECISION_PAIRS, CHOSEN_PRECISIONS, CHOSEN_PRECISIONS))
def test_a_run_goes_on_in_other_numbers(precisions, writer, reader):
    assert precisions.run(writer, reader).problems == []


# Each layout of a mixture writes for the next one, and the last for the first.
EXPERT_PAIRS = [(one, other) for one in EXPERTS for other in EXPERTS]
CHOSEN_EXPERTS = [*zip(EXPERTS, [*EXPERTS][1:] + [*EXPERTS][:1], strict=True), ("dp2 ep2", "dp2 ep2")]


@pytest.mark.parametrize(
    ("writer", "reader"), _params(EXPERT_PAIRS, CHOSEN_EXPERTS, (CHOSEN_EXPERTS[2], CHOSEN_EXPERTS[5]))
)
def test_a_mixture_goes_on_in_another_layout(mixtures, writer, reader):
    assert mixtures.run(writer, reader).problems == []
