"""Test of one implementation in one case: compare, then time."""

import math
from math import prod

import torch

from megalite.ops.choice import TORCH
from megalite.selftest.check import Comparison, check, inputs_of
from megalite.selftest.clock import medians
from megalite.selftest.registry import Case, Shape
from megalite.selftest.trust import CaseResult

SEED = 20


def prove(case: Case, implementation: str, device: torch.device) -> CaseResult:
    """Test one implementation: stop at the first shape with a wrong result; time it on a run's own shape only.

    Exceptions of the implementation, or of torch's form, propagate.
    """
    entry, candidate = case.entry, case.entry.candidates[implementation]
    worst = Comparison(0.0, 1.0, True)
    for shape in case.shapes:
        checked = compared_shape(case, shape)
        inputs = inputs_of(entry, checked, case.dtype, device, SEED)
        if complaint := candidate.why_not(inputs):
            if case.own:
                return CaseResult("absent", complaint)
            continue  # the implementation may support other odd sizes
        comparison = check(entry, implementation, checked, case.dtype, device, SEED)
        if comparison.share >= worst.share:
            worst = comparison
        if complaint := _complaint(comparison, checked):
            return CaseResult("wrong", complaint, comparison.error, comparison.allowed)
    if not case.own:
        return CaseResult("right", "", worst.error, worst.allowed)
    shape = timed_shape(case, case.shapes[0])
    inputs = inputs_of(entry, shape, case.dtype, device, SEED, alike=False)
    forms = {name: entry.form(name) for name in (implementation, TORCH)}
    seconds = medians(forms, inputs, entry.gradients, device)
    return CaseResult("right", "", worst.error, worst.allowed, seconds[implementation], seconds[TORCH])


def _complaint(comparison: Comparison, shape: Shape) -> str:
    sizes = "x".join(map(str, shape))
    if math.isinf(comparison.error):
        return f"wrong: values that are not finite, not written or of another shape, at {sizes}"
    if not comparison.share <= 1:
        return f"wrong: error {comparison.error:.1e} over {comparison.allowed:.1e}, at {sizes}"
    return "" if comparison.equal_repeats else f"wrong: a second call gives other numbers, at {sizes}"


# Limits on the elements of the largest tensor, when compared with float64 and when timed.
_COMPARED, _TIMED = 1 << 23, 1 << 27


def compared_shape(case: Case, shape: Shape) -> Shape:
    """Return the shape, reduced so that the float64 reference and its score matrix fit into memory."""
    return bounded(shape, _COMPARED, scores=case.entry.operator.startswith("attention"))


def timed_shape(case: Case, shape: Shape) -> Shape:
    """Return the run's own shape, reduced if a tensor would have more than 2^27 elements."""
    return bounded(shape, _TIMED, scores=case.entry.operator == "attention_dropout")


def bounded(shape: Shape, most: int, *, scores: bool) -> Shape:
    """Return the shape with at most `most` elements: with fewer rows, then heads, then tokens."""
    if len(shape) == 2:
        rows, columns = shape
        return min(rows, max(1, most // columns)), columns
    rows, sequence, heads, head_dim, *rest = shape
    group = rest[0] if rest else 1

    def elements(rows: int, sequence: int, heads: int) -> int:
        return prod((rows, heads, group, sequence)) * (sequence if scores else head_dim)

    rows = min(rows, max(1, most // elements(1, sequence, heads)))
    heads = min(heads, max(1, most // elements(rows, sequence, 1)))
    while sequence > 64 and elements(rows, sequence, heads) > most:
        sequence //= 2
    return rows, sequence, heads, head_dim, *rest
