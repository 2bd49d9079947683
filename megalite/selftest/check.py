"""Check of one implementation: against float64, with poisoned uninitialised memory, and for equal repeats."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.selftest.registry import Entry, Form, Shape

MOST = 2.0
"""An implementation's largest allowed error: this many times the plain form's error in the same dtype, plus one unit in
the last place."""
NOISE = 1e-6
"""A tensor whose values are below this, relative to the largest output, consists of cancelled sums: rounding noise."""


@dataclass(frozen=True)
class Comparison:
    """The error of the output or gradient that is closest to its limit, and whether repeats are equal."""

    error: float
    allowed: float
    equal_repeats: bool

    @property
    def share(self) -> float:
        """The error over the allowed error: at most 1 is right; inf for non-finite values or a wrong shape."""
        return self.error / self.allowed if self.error else 0.0


def inputs_of(
    entry: Entry,
    shape: Shape,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int,
    *,
    alike: bool = True,
) -> list[Tensor]:
    """Return random inputs on a device. alike: every device gets the same, drawn on the CPU, which takes seconds for
    those that are timed."""
    source = "cpu" if alike else device
    generator = torch.Generator(source).manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        # Drawn in float64: low-precision random numbers have fewer digits.
        drawn = torch.float64 if alike else torch.float32
        return torch.randn(*sizes, generator=generator, dtype=drawn, device=source).to(dtype).to(device)

    torch.manual_seed(seed)
    return [*entry.make(shape, dtype, random)]


def run(form: Form, inputs: Sequence[Tensor], gradients: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the outputs, then the gradients of the first `gradients` inputs; does not change the inputs.

    The outputs' gradients are random numbers rounded to `dtype`, the checked operator's, in the reference too.
    """
    leaves = [
        tensor.detach().clone().requires_grad_(index < gradients) for index, tensor in enumerate(inputs)
    ]
    made = form(*leaves)
    outputs = [made] if isinstance(made, Tensor) else [*made]
    detached = [tensor.detach() for tensor in outputs]
    if not gradients:
        return detached
    generator = torch.Generator().manual_seed(1)
    grads = [
        torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .to(tensor.device, tensor.dtype)
        for tensor in outputs
    ]
    return [*detached, *torch.autograd.grad(outputs, leaves[:gradients], grads)]


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill every tensor that torch allocates with `empty` with NaN, so that an unwritten element shows.

    That is part of torch's deterministic mode (torch.utils.deterministic.fill_uninitialized_memory).
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
    result: Tensor, plain: Tensor, exact: Tensor, largest: float, units: float = 1.0
) -> tuple[float, float]:
    """Return a tensor's largest error and the allowed error; the error is inf if an element is not finite.

    For a tensor of rounding noise around 0 (the gradient of a query that sees one key) the unit in the last place is
    taken from `largest`, the largest value of all outputs and gradients.
    """
    if result.shape != exact.shape or result.dtype != plain.dtype:
        return math.inf, 1.0
    if not exact.numel():
        return 0.0, 1.0
    error, plain_error = ((each.double() - exact).abs().max().item() for each in (result, plain))
    own = exact.abs().max().item()
    unit = torch.finfo(result.dtype).eps * (own if own > NOISE * largest else largest)
    units = units if result.element_size() >= 4 else 1.0
    finite = bool(result.isfinite().all())
    return error if finite else math.inf, MOST * plain_error + units * unit


def check(
    entry: Entry,
    implementation: str,
    shape: Shape,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int = 0,
) -> Comparison:
    """Compare one implementation with the plain form in float64, both on fresh random inputs on the device."""
    inputs = inputs_of(entry, shape, dtype, device, seed)
    in_float64 = [each.double() if each.is_floating_point() else each for each in inputs]
    exact = run(entry.plain, in_float64, entry.gradients, dtype)
    plain = run(entry.plain, inputs, entry.gradients, dtype)
    with poisoned():
        form = entry.form(implementation)
        results, repeated = (run(form, inputs, entry.gradients, dtype) for _ in range(2))
    if len(results) != len(exact):
        return Comparison(math.inf, 1.0, True)
    largest = max((each.abs().max().item() for each in exact if each.numel()), default=0.0)
    compared = [compare(*each, largest, entry.units) for each in zip(results, plain, exact, strict=True)]
    error, allowed = max(compared, key=lambda pair: pair[0] / pair[1] if pair[0] else 0.0)
    equal = all(torch.equal(first, second) for first, second in zip(results, repeated, strict=True))
    return Comparison(error, allowed, equal or not entry.candidates[implementation].repeats)
