"""Linear and embedding backwards that add weight gradients to the sum in place, or leave them to a later moment."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.adamw import add_weight_gradient_
from megalite.ops.expert_products import add_expert_gradients_, expert_weight_gradients
from megalite.ops.linear import few_rows_linear


@dataclass(frozen=True)
class WeightGradients:
    """How the backwards of linears and embeddings give the gradients of trained weights; by default to autograd.

    accumulate: a function like ops.adamw.add_weight_gradient_, by which they add to the sum in place, where that is at
    least float32. Otherwise autograd materialises every partial gradient, including embedding rows that no token used.
    Only where no gradient is read before all parts are summed; weights with hooks are left to autograd.
    deferrable: `deferred_weight_gradients` may leave those of linears for later.
    """

    accumulate: Callable[[Tensor, Tensor, Tensor], None] | None = None
    deferrable: bool = False

    def sums_in_place(self, weight: Tensor) -> bool:
        """Return whether backward adds to this weight's gradient itself."""
        if self.accumulate is None or torch.compiler.is_compiling() or not weight.requires_grad:
            return False
        # A tensor hook must see autograd's gradient; a post-accumulate hook sees the sum either way.
        return not weight._backward_hooks and (
            weight.element_size() >= 4 or weight.grad_dtype == torch.float32
        )

    def of_product(
        self,
        weight: Tensor,
        grad: Tensor,
        inputs: Callable[[], Tensor],
        counts: Sequence[int] | None = None,
    ) -> Tensor | None:
        """Return grad [N, out]^T inputs [N, in]; None if the product is or will be added to `weight.grad`.

        counts: the rows of each expert, for the stacked products of experts [n * out, in]. The gradient of a weight
        that is computed of others is autograd's.
        """
        if not weight.is_leaf or not (deferring() or self.sums_in_place(weight)):
            return _product(grad, inputs(), counts)
        now_or_later(partial(self._add_product, weight, grad, inputs, counts))
        return None

    @torch.no_grad()
    def _add_product(
        self, weight: Tensor, grad: Tensor, inputs: Callable[[], Tensor], counts: Sequence[int] | None
    ) -> None:
        if weight.grad is None:
            # Set at once instead of returned: a tied embedding's backward adds to this sum.
            weight.grad = _product(grad, inputs(), counts).to(weight.grad_dtype)
        elif counts is None:
            self._add_to(weight.grad, grad, inputs())
        else:
            add_expert_gradients_(weight.grad, grad, inputs(), counts, self._add_to)

    def _add_to(self, total: Tensor, grad: Tensor, inputs: Tensor) -> None:
        if total.dtype == grad.dtype:
            total.addmm_(grad.t(), inputs)
        else:
            (self.accumulate or add_weight_gradient_)(total, grad, inputs)


BY_AUTOGRAD = WeightGradients()


def _product(grad: Tensor, inputs: Tensor, counts: Sequence[int] | None) -> Tensor:
    return grad.t() @ inputs if counts is None else expert_weight_gradients(grad, inputs, counts)


# The weight gradients that a split backward leaves for later; None outside of one. Not of a thread: autograd computes
# on a GPU in threads of its own.
_deferred: list[Callable[[], None]] | None = None


@contextmanager
def deferred_weight_gradients() -> Iterator[list[Callable[[], None]]]:
    """Have backwards inside of the `with` block leave the weight gradients of linears to the calls in the list.

    The calls keep the inputs and output gradients of their linears; their order is that of the backward.
    """
    global _deferred
    before, _deferred = _deferred, []
    try:
        yield _deferred
    finally:
        _deferred = before


def now_or_later(compute: Callable[[], None]) -> None:
    """Compute a weight's gradient, or leave that for later."""
    if _deferred is None:
        compute()
    else:
        _deferred.append(compute)


def deferring() -> bool:
    """Return whether weight gradients are left for later now."""
    return _deferred is not None


def product_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a linear's inputs and weight, its function's first two arguments, both saved in `ctx`."""
    inputs, weight = ctx.saved_tensors
    for_inputs, for_weight, *_ = ctx.needs_input_grad
    flat_grad, for_product = grad.flatten(0, -2), ctx.gradients.of_product
    return (
        grad @ weight if for_inputs else None,
        for_product(ctx.parameter, flat_grad, lambda: inputs.flatten(0, -2)) if for_weight else None,
    )


class _SummingLinear(torch.autograd.Function):
    """A linear whose backward adds the weight's gradient to `weight.grad` in place, or leaves it for later."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        # A recomputed region gives back saved tensors without their gradients.
        ctx.parameter, ctx.gradients = weight, gradients
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        bias_grad = grad.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[2] else None
        return *product_gradients(ctx, grad), bias_grad, None


def linear(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, gradients: WeightGradients = BY_AUTOGRAD
) -> Tensor:
    if not torch.is_grad_enabled():
        return few_rows_linear(inputs, weight, bias)
    own = gradients.sums_in_place(weight) or (gradients.deferrable and weight.requires_grad)
    if torch.compiler.is_compiling() or not own:
        return F.linear(inputs, weight, bias)
    output: Tensor = _SummingLinear.apply(inputs, weight, bias, gradients)  # type: ignore[no-untyped-call]
    return output


class _SummingEmbedding(torch.autograd.Function):
    """An embedding look-up whose backward adds to the used rows of the weight's gradient, if that exists already."""

    @staticmethod
    def forward(ctx: Any, input_ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input_ids)
        ctx.parameter = weight  # as in _SummingLinear
        return F.embedding(input_ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (input_ids,), weight = ctx.saved_tensors, ctx.parameter
        total = weight.grad
        if total is None:
            return None, torch.ops.aten.embedding_dense_backward(grad, input_ids, len(weight), -1, False)
        rows = grad.flatten(0, -2).to(total.dtype)
        total.index_add_(0, input_ids.flatten(), rows)
        return None, None


def embedding(input_ids: Tensor, weight: Tensor, gradients: WeightGradients) -> Tensor:
    # On a GPU index_add_ sums in a nondeterministic order: a resumed run would not match bit for bit.
    in_place = weight.device.type == "cpu" and gradients.sums_in_place(weight)
    if not (in_place and torch.is_grad_enabled()):
        return F.embedding(input_ids, weight)
    embedded: Tensor = _SummingEmbedding.apply(input_ids, weight)  # type: ignore[no-untyped-call]
    return embedded
