"""One row of the suite for each operator, shape and type: its error as a share of what megalite selftest allows."""

from typing import Any

import torch

from benchmarks.gpu.operators import Operator
from megalite.ops.choice import COMPILED
from megalite.selftest.check import check as compared
from megalite.selftest.check import inputs_of
from megalite.selftest.registry import Shape


def check(operator: Operator, shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Any]:
    """One row: the worst error of outputs and gradients over what is allowed, and whether a repeat is equal.

    Raises LookupError where the library has no such operator, or none for these inputs: torch would be compared with
    itself.
    """
    inputs = inputs_of(operator.entry, shape, dtype, device, seed)
    if complaint := operator.ours.why_not_on(device) or operator.ours.why_not(inputs):
        raise LookupError(complaint)
    found = compared(operator.entry, COMPILED, shape, dtype, device, seed)
    return {
        "operator": operator.name,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": "x".join(map(str, shape)),
        "error_share": found.share,
        "equal_repeats": found.equal_repeats,
        "right": found.share <= 1 and found.equal_repeats,
    }
