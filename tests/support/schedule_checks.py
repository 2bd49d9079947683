"""Check of the order of a schedule's actions, and the micro batches that a stage holds at once."""

from collections.abc import Sequence

from megalite.topology.schedule_timeline import alive_chunks, play, unfinished_work
from megalite.topology.schedules import Action
from megalite.topology.stages import PipelineSplit


def check_order(orders: Sequence[Sequence[Action]], split: PipelineSplit, micro_batches: int) -> list[str]:
    """Return the problems of the stages' orders; an empty list if they are right.

    They are right if every chunk of the split runs on its own stage, once forward and once backward (B, or I and W)
    for every micro batch, without a deadlock.
    """
    wrong = [
        f"stage {stage} runs {action}, which is not on this stage"
        for stage, order in enumerate(orders)
        for action in order
        if action.chunk not in split.chunks_of(stage) or action.micro_batch >= micro_batches
    ]
    wrong += unfinished_work(orders, len(split.layers), micro_batches)
    if not wrong:
        try:
            play(orders)
        except ValueError as error:
            wrong.append(str(error))
    return wrong


def in_flight_peak(order: Sequence[Action]) -> int:
    """Return the peak number of micro batches whose activations a stage holds."""
    return max(len({micro_batch for _, micro_batch in alive}) for alive in alive_chunks(order))
