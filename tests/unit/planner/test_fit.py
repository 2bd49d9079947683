"""The most that fits one card is the largest that does, and no longer than the model's positions."""

from dataclasses import replace

from megalite.config.sections.training_section import ComputeSettings
from megalite.planner.fit import card_fits, on_one_card
from megalite.planner.memory import CARD_BASE_BYTES, stage_memory
from megalite.topology.axes import Layout
from tests.unit.planner.plans import SHAPE, plan

LIMIT = CARD_BASE_BYTES + 64 * 2**20


def test_the_largest_micro_batch_fits_and_one_sequence_more_does_not() -> None:
    run = plan()
    for fit in card_fits(run, LIMIT):
        moded = replace(on_one_card(run), training=ComputeSettings(recompute=fit.recompute))
        peaks = [
            stage_memory(
                replace(moded, micro_batch_size=fit.micro_batch_size + more), 0, base=CARD_BASE_BYTES
            ).peak
            for more in (0, 1)
        ]
        assert peaks[0] <= LIMIT < peaks[1]


def test_no_sequence_is_longer_than_the_positions() -> None:
    shape = replace(SHAPE, max_position_embeddings=256)
    assert [fit.sequence_length for fit in card_fits(plan(shape), 80 * 2**30)] == [256, 256, 256]
    assert [fit.micro_batch_size for fit in card_fits(plan(shape), CARD_BASE_BYTES)] == [0, 0, 0]


def test_one_card_accumulates_gradients_and_shards_nothing() -> None:
    alone = on_one_card(plan(layout=Layout(tensor=2, data=4), zero_stage=2, micro_batches=1))
    assert (alone.layout, alone.zero_stage, alone.micro_batches) == (Layout(), 0, 2)
    assert on_one_card(plan(micro_batches=6)).micro_batches == 6
