"""The findings of a comparison: the quantities of a step in their order, errors, departures. No torch."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

INITIAL, OWN, SUMMED, UPDATED = "initial weights", "gradient before the sum", "gradient", "weights"
"""The quantities of tensors; those of the optimizer's state are `STATE` and a key."""
STATE = "optimizer state "
LOSS, NORM, OUTPUT = "loss", "gradient norm", "output"
# In the order of a step: who departs in one of them makes the later ones depart.
ORDER = (INITIAL, LOSS, OWN, SUMMED, NORM, STATE, UPDATED)


@dataclass(frozen=True)
class Departure:
    """The first value that departs from one process.

    quantity: of ORDER, or `OUTPUT` of a module that is the first whose output departs. error: relative. ulps: in units
    in the last place. place: the global index of the worst value. ranks: those that hold such values.
    """

    step: int
    quantity: str
    name: str
    ranks: tuple[int, ...]
    error: float
    bound: float
    ulps: float = math.nan
    place: tuple[int, ...] = ()
    value: float = math.nan
    expected: float = math.nan
    note: str = ""


@dataclass(frozen=True)
class Worst:
    """The error of a quantity that is nearest to, or farthest beyond, what is allowed, over all steps and tensors."""

    error: float = 0.0
    allowed: float = 0.0
    name: str = ""
    step: int = 0
    tensors: int = 0
    values: int = 0

    @property
    def share(self) -> float:
        """How much of what is allowed the error is."""
        if not self.error:
            return 0.0
        return self.error / self.allowed if self.allowed else math.inf


@dataclass
class LayoutComparison:
    """The largest errors by quantity, and the departures in the order in which a step makes them.

    errors: quantity -> tensor -> its largest error; "" for numbers.
    """

    worst: dict[str, Worst] = field(default_factory=lambda: defaultdict(Worst))
    errors: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    departures: list[Departure] = field(default_factory=list)
    skipped_steps: int = 0
