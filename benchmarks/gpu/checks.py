"""Whether each operator computes what it should: against float64, over poisoned memory, equal when repeated."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.operators import Form, Operator, Shape

MOST = 2.0
"""How many times the error of the plain form in the same type an operator may have, beside a unit in the last place."""
NOISE = 1e-6
"""Beside a tensor with values of 1, one with values below this is sums that cancel."""


def inputs_of(operator: Operator, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        # Not in the type itself: its random numbers are of fewer digits.
        return torch.randn(*sizes, generator=generator, device=device, dtype=torch.float64).to(dtype)

    torch.manual_seed(seed)
    return [*operator.make(shape, dtype, random)]


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
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    grads = [
        torch.randn(each.shape, generator=generator, device=each.device, dtype=torch.float64)
        .to(dtype)
        .to(each.dtype)
        for each in outputs
    ]
    return [*detached, *torch.autograd.grad(outputs, leaves[:gradients], grads)]


@contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that torch makes "empty" in here is NaN: an element nobody writes shows.

    That is what torch does in its deterministic mode (torch.utils.deterministic.fill_uninitialized_memory).
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def excess(fused: Tensor, plain: Tensor, exact: Tensor, largest: float) -> float:
    """The error over what is allowed: at most 1 is right; inf where something is not finite.

    A tensor that is zero but for rounding (the gradient of a query that sees one key) is measured by `largest`, that of
    all the operator gives.
    """
    if not exact.numel():
        return 0.0
    if fused.shape != exact.shape or not bool(fused.isfinite().all()):
        return float("inf")
    error, plain_error = ((each.double() - exact).abs().max().item() for each in (fused, plain))
    own = exact.abs().max().item()
    unit = torch.finfo(fused.dtype).eps * (own if own > NOISE * largest else largest)
    return error / (MOST * plain_error + unit) if error else 0.0


def check(operator: Operator, shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Any]:
    """One row: the worst error of outputs and gradients over what is allowed, and whether a repeat is equal."""
    inputs = inputs_of(operator, shape, dtype, device, seed)
    wide = [each.double() if each.is_floating_point() else each for each in inputs]
    exact = run(operator.plain, wide, operator.gradients, dtype)
    plain = run(operator.plain, inputs, operator.gradients, dtype)
    with poisoned():
        fused, again = (run(operator.fused, inputs, operator.gradients, dtype) for _ in range(2))
    largest = max((each.abs().max().item() for each in exact if each.numel()), default=0.0)
    worst = max(excess(*each, largest) for each in zip(fused, plain, exact, strict=True))
    equal = all(torch.equal(one, other) for one, other in zip(fused, again, strict=True))
    return {
        "operator": operator.name,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": "x".join(map(str, shape)),
        "error_share": worst,
        "equal_repeats": equal,
        "right": worst <= 1 and equal,
    }
