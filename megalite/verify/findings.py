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


@dataclass
class Worst:
    """The largest error of a quantity over all steps, tensors and ranks, and what is allowed."""

    error: float = 0.0
    allowed: float = 0.0
    name: str = ""
    step: int = 0
    tensors: int = 0
    values: int = 0


@dataclass
class LayoutComparison:
    """The largest errors by quantity, and the departures in the order in which a step makes them."""

    worst: dict[str, Worst] = field(default_factory=lambda: defaultdict(Worst))
    departures: list[Departure] = field(default_factory=list)
    skipped_steps: int = 0
