"""The losses of a run step by step: which one is a spike, and the mean of an epoch."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import takewhile
from statistics import fmean, median
from typing import Any

_FEWEST, _SHARE = 20, 0.1


class LossSpikes:
    """Compares each loss with the median of the last `window` steps, once there are 20 or the window is full.

    A spike exceeds the median by more than `deviations` times the median absolute deviation of these losses, and by
    more than a tenth of the median; eight of them are 5.4 standard deviations of normal noise. Losses that are not
    finite are no spikes, and leave the median as it is. OLMo 2 (2025) skips a step six standard deviations above the
    mean of 128 steps; a median does not follow the spikes themselves.
    """

    def __init__(self, window: int = 100, deviations: float = 8.0):
        self._losses, self._deviations = deque[float](maxlen=window), deviations

    @property
    def losses(self) -> list[float]:
        """The losses of the window, the last one at the end."""
        return [*self._losses]

    def go_on(self, losses: Iterable[float]) -> None:
        """Compare the next loss with these ones."""
        self._losses = deque(losses, maxlen=self._losses.maxlen)

    def update(self, loss: float) -> float | None:
        """Add the loss of a step; return by how much a spike exceeds the median, None: it is no spike."""
        if not math.isfinite(loss):
            return None
        losses = self.losses
        self._losses.append(loss)
        if len(losses) < min(_FEWEST, self._losses.maxlen or _FEWEST):
            return None
        middle = median(losses)
        spread = median(abs(earlier - middle) for earlier in losses)
        excess = loss - middle
        return excess if excess > max(self._deviations * spread, _SHARE * abs(middle)) else None


class EpochLoss:
    """The mean loss of an epoch's steps. A loss that is not finite does not count."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()):
        """records: of metrics.jsonl before the first step, the newest first; the epoch that has not ended goes on."""
        open_epoch = takewhile(lambda record: "epoch" not in record, records)
        losses = (record.get("loss") for record in open_epoch)
        self._losses = [loss for loss in losses if loss is not None]

    def add(self, loss: float, *, ends: bool) -> float | None:
        """Add the loss of a step; return the mean of the epoch that ends with it, nan without a finite loss."""
        if math.isfinite(loss):
            self._losses.append(loss)
        if not ends:
            return None
        losses, self._losses = self._losses, []
        return fmean(losses) if losses else math.nan
