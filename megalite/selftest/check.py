"""Whether an implementation computes what it should: against float64, over poisoned memory, equal when repeated."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.selftest.registry import Candidate, Entry, Form, Shape

MOST = 2.0
"""How many times the error of the plain form in the same type an implementation may have, beside a unit in the last
place."""
NOISE = 1e-6
"""Beside a tensor with values of 1, one with values below this is sums that cancel."""


@dataclass(frozen=True)
class Comparison:
    """The largest error of outputs and gradients, by its share of what is allowed; whether a repeat is equal."""

    error: float
    allowed: float
    equal_repeats: bool

    @property
    def share(self) -> float:
        """At most 1 is right; inf where something is not finite or not of the right shape."""
        return self.error / self.allowed if self.error else 0.0


def inputs_of(
    entry: Entry, shape: Shape, dtype: torch.dtype, device: str | torch.device, seed: int
) -> list[Tensor]:
    """Random inputs on a device: drawn on the CPU, so that every device is given the same."""
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        # Not in the type itself: its random numbers are of fewer digits.
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype).to(device)

    torch.manual_seed(seed)
    return [*entry.make(shape, dtype, random)]


def run(form: Form, inputs: Sequence[Tensor], gradients: int, dtype: torch.dtype) -> list[Tensor]:
    """Outputs, then gradients of the first `gradients` inputs for random ones of the outputs; inputs stay as they are.

    dtype: of the operator that is checked; whatever type is computed in, it is asked for gradients of numbers of it.
    """
    leaves = [each.detach().clone().requires_grad_(index < gradients) for index, each in enumerate(inputs)]
    made = form(*leaves)
    outputs = [made] if isinstance(made, Tensor) else [*made]
    detached = [each.detach() for each in outputs]
    if not gradients:
        return detached
    generator = torch.Generator().manual_seed(1)
    grads = [
        torch.randn(each.shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .to(each.device, each.dtype)
        for each in outputs
    ]
    return [*detached, *torch.autograd.grad(outputs, leaves[:gradients], grads)]


@contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that torch makes "empty" in here is NaN: an element nobody writes shows.

    That is what torch does in its deterministic mode (torch.utils.deterministic.fill_uninitialized_memory).
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(
        "warn"
    )  # use_deterministic_algorithms would import the compiler: seconds
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def compare(
    found: Tensor, plain: Tensor, exact: Tensor, largest: float, units: float = 1.0
) -> tuple[float, float]:
    """The largest error of a tensor and what is allowed; the error is inf where something is not finite.

    A tensor that is zero but for rounding (the gradient of a query that sees one key) is measured by `largest`, that of
    all the operator gives.
    """
    if found.shape != exact.shape or found.dtype != plain.dtype:
        return math.inf, 1.0
    if not exact.numel():
        return 0.0, 1.0
    error, plain_error = ((each.double() - exact).abs().max().item() for each in (found, plain))
    own = exact.abs().max().item()
    unit = torch.finfo(found.dtype).eps * (own if own > NOISE * largest else largest)
    units = units if found.element_size() >= 4 else 1.0
    finite = bool(found.isfinite().all())
    return error if finite else math.inf, MOST * plain_error + units * unit


def check(
    entry: Entry,
    candidate: Candidate,
    shape: Shape,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int = 0,
) -> Comparison:
    """Compares one implementation with the plain form in float64, both on fresh random inputs on the device."""
    inputs = inputs_of(entry, shape, dtype, device, seed)
    wide = [each.double() if each.is_floating_point() else each for each in inputs]
    exact = run(entry.plain, wide, entry.gradients, dtype)
    plain = run(entry.plain, inputs, entry.gradients, dtype)
    with poisoned():
        found, again = (run(candidate.form, inputs, entry.gradients, dtype) for _ in range(2))
    if len(found) != len(exact):
        return Comparison(math.inf, 1.0, True)
    largest = max((each.abs().max().item() for each in exact if each.numel()), default=0.0)
    compared = [compare(*each, largest, entry.units) for each in zip(found, plain, exact, strict=True)]
    error, allowed = max(compared, key=lambda each: each[0] / each[1] if each[0] else 0.0)
    equal = all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    return Comparison(error, allowed, equal or not candidate.repeats)
