"""The loss of each token, as the last chunk's head computes it, where a run only ever sees sums of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megalite.model.transformer import Stage
from megalite.parallel.pipeline import PipelineRunner
from megalite.parallel.step_batch import EVALUATION, ForwardMode, StepBatch


@contextmanager
def recorded_losses(stage: Stage) -> Iterator[list[Tensor]]:
    """Yield a list that takes the weighted losses [b, S] of each forward of the last chunk, if `stage` holds it."""
    recorded: list[Tensor] = []
    last = next((chunk for chunk in stage.chunks if chunk.is_last), None)
    if last is None:
        yield recorded
        return
    compute = last.output.losses

    def record(*arguments: Any, **named: Any) -> Tensor:
        recorded.append(compute(*arguments, **named))
        return recorded[-1]

    last.output.losses = record  # type: ignore[method-assign]
    try:
        yield recorded
    finally:
        del last.output.losses


def token_losses(
    stage: Stage, pipeline: PipelineRunner, batch: StepBatch, *, mode: ForwardMode = EVALUATION
) -> Tensor | None:
    """Return the weighted losses [M * b, S] of a batch where the last chunk is, None elsewhere; outside of autograd."""
    with recorded_losses(stage) as recorded:
        pipeline.row_losses(batch, mode)
    return torch.cat(recorded) if recorded else None
