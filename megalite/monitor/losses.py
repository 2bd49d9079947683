"""The losses of a run step by step: which one is a spike, and the mean of an epoch."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import Any

_WINDOW, _FEWEST = 100, 20
# Eight median absolute deviations are 5.4 standard deviations of normal noise.
_DEVIATIONS, _SHARE = 8, 0.1


class LossSpikes:
    """Compares each loss with the median of the last 100 steps, once there are 20.

    A spike exceeds the median by more than 8 times the median absolute deviation of these losses, and by more than a
    tenth of the median. Losses that are not finite are no spikes, and leave the median as it is.
    """

    def __init__(self, losses: Iterable[float | None] = ()):
        """losses: of the steps before the first one; None: not finite."""
        self._losses = deque((loss for loss in losses if loss is not None), maxlen=_WINDOW)

    def update(self, loss: float) -> float | None:
        """Add the loss of a step; return by how much a spike exceeds the median, None: it is no spike."""
        if not math.isfinite(loss):
            return None
        losses = [*self._losses]
        self._losses.append(loss)
        if len(losses) < _FEWEST:
            return None
        middle = median(losses)
        spread = median(abs(earlier - middle) for earlier in losses)
        excess = loss - middle
        return excess if excess > max(_DEVIATIONS * spread, _SHARE * abs(middle)) else None


class EpochLoss:
    """The mean loss of an epoch's steps. A loss that is not finite does not count."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()):
        """records: of metrics.jsonl before the first step; the epoch goes on behind the last one that ended."""
        self._losses: list[float] = []
        for record in records:
            if "loss" in record:
                self.add(math.nan if record["loss"] is None else record["loss"], ends="epoch" in record)

    def add(self, loss: float, *, ends: bool) -> float | None:
        """Add the loss of a step; return the mean of the epoch that ends with it, nan without a finite loss."""
        if math.isfinite(loss):
            self._losses.append(loss)
        if not ends:
            return None
        losses, self._losses = self._losses, []
        return fmean(losses) if losses else math.nan
