"""The trainer's view of an optimizer, and what one update reports."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megalite.errors import TrainingError
from megalite.model.transformer import Stage
from megalite.parallel.gradient_buckets import GradientBuckets
from megalite.topology.parameters import Parameter
from megalite.topology.state import OptimizerState
from megalite.train.optimizer.loss_scale import LossScale
from megalite.train.optimizer.update_norms import UpdateNorms


@dataclass(frozen=True)
class Update:
    """The result of one `step`.

    grad_norm: the global norm of the gradient, without the loss scale, before clipping; nan if it is not finite.
    skipped_for: the setting for which no weight was changed, "nonfinite" or "loss_spike"; empty if they were.
    overflow: the first tensor whose gradient is not finite.
    """

    grad_norm: float
    skipped_for: str = ""
    overflow: str | None = None

    @property
    def skipped(self) -> bool:
        return bool(self.skipped_for)


class Optimizer(Protocol):
    """An optimizer as the training step uses it: after all backwards `reduce_gradients`, then `step`."""

    state: OptimizerState
    buckets: GradientBuckets | None
    """The sums over the data-parallel ranks that start during backward; None: there are none, or the engine's own."""

    @property
    def loss_scale(self) -> float:
        """The factor on the loss, and so on the gradients, of the next step; 1 unless the precision is fp16."""
        ...

    def wrap(self, stage: Stage) -> Callable[..., Tensor]:
        """The forward that a one-stage pipeline calls in place of `stage`; an engine may gather weights around it."""
        ...

    def reduce_gradients(self) -> None:
        """Complete the gradients once all backwards of a step are done: sum tied and replicated weights over their
        copies, then sum over the data-parallel ranks. Collective."""
        ...

    def gradients(self) -> Iterator[tuple[Parameter, int, Tensor]]:
        """Yield the flat ranges of the reduced gradients on this rank, with the loss scale, as `StateShard` has ranges.

        Between `reduce_gradients` and `step`. An engine that reduces in backward (ZeRO 2 and 3) yields none.
        """
        ...

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the squared norm of the reduced gradient, as it lies in `.grad`, [] float64; the
        shares of all ranks sum to it. Zero where `step` computes the norm (ZeRO)."""
        ...

    def step(self, learning_rate: float, squared_norm: float, norms: UpdateNorms | None = None) -> Update:
        """Clip, update, clear gradients. squared_norm: the sum of `squared_norm()` over all ranks.

        norms: records the update, unless it is skipped.

        Raises TrainingError, on every rank alike and before any weight changes, when the norm is not finite, unless
        the settings leave such a step out.
        """
        ...

    def skip(self) -> None:
        """Leave out the update and clear gradients: weights and optimizer state stay as they are. Collective."""
        ...


def skip_update(scale: LossScale | None, tensor: str | None, *, skip_nonfinite: bool) -> Update:
    """Report an update that was skipped because the gradient of `tensor` is not finite, and lower the loss scale.

    Raises TrainingError if the scale cannot be lowered, or if there is none and `skip_nonfinite` is False.
    """
    if scale is None:
        if not skip_nonfinite:
            raise TrainingError(
                f"the gradient is not finite, first in {tensor}: no weight was changed; lower optimizer.learning_rate,"
                " set optimizer.gradient_clipping, or look at the data of this step, then run again to resume"
            )
    elif scale.exhausted:
        raise TrainingError(
            f"fp16 overflows in the gradient of {tensor} at the smallest loss scale, {scale.value:g}:"
            ' no weight was changed; use training.precision = "bf16", or lower optimizer.learning_rate,'
            " then run again to resume"
        )
    else:
        scale.overflowed()
    # Not inf: ZeRO does not tell one from the other.
    return Update(math.nan, "nonfinite", tensor)
