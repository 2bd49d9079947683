"""The optimizer's operators on lists of tensors."""

import torch
from torch import Tensor

from megalite.ops import apex
from megalite.ops.adamw import AdamWRule, AdamWTensors
from megalite.ops.choice import COMPILED, PLAIN_TORCH, Operators
from megalite.selftest.norms import ROWS
from megalite.selftest.registry import LOW_PRECISION, Candidate, Entry, Form, Shape, Workload, compiled

_RULE = AdamWRule(
    learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=7, gradient_scale=0.5
)
_TOKENS = 512  # tokens summed in a weight gradient
# Shapes of lists of tensors: (tensors, elements of each).
LISTS: tuple[Shape, ...] = ((1, 1), (3, 8193), (90, 5), (2, 4099))


def _weights(run: Workload) -> Shape:
    """Return the shape of eight MLP weights of the run."""
    return 8, run.hidden_size * run.intermediate_size


def _make_update(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Return fp32 weights, copies of `dtype` filled with NaN, gradients of `dtype`, and both fp32 moments."""
    count, size = shape
    weights, gradients = ([random(size) for _ in range(count)] for _ in range(2))
    copies = [torch.full_like(each, torch.nan) for each in gradients]
    means, squares = ([torch.rand_like(each.float()) for each in gradients] for _ in range(2))
    return [*(each.float() for each in weights), *copies, *gradients, *means, *squares]


def _update(operators: Operators) -> Form:
    def form(*tensors: Tensor) -> list[Tensor]:
        count = len(tensors) // 5
        weights, copies, gradients, means, squares = (
            [*tensors[start : start + count]] for start in range(0, len(tensors), count)
        )
        low_precision = copies if copies[0].element_size() < 4 else []
        operators.adamw(AdamWTensors(weights, low_precision, gradients, means, squares), _RULE)
        return [*weights, *(low_precision or [each.clone() for each in weights]), *means, *squares]

    return form


def _make_product(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Return a sum [out, in] in float32, gradients of outputs [tokens, out] and inputs [tokens, in] of `dtype`.

    The factors are small integers, whose products low precision represents exactly, so only fp32 rounding remains.
    """
    outputs, inputs = shape
    grad, signs = random(_TOKENS, outputs).round(), random(_TOKENS, inputs).sign()
    return [random(outputs, inputs).float(), grad, signs]


def _sum(operators: Operators) -> Form:
    def form(total: Tensor, grad: Tensor, inputs: Tensor) -> Tensor:
        operators.accumulate(total, grad, inputs)
        return total

    return form


ENTRIES = [
    Entry(
        name="AdamW, float32 masters and 16-bit copies",
        operator="adamw",
        make=_make_update,
        plain=_update(PLAIN_TORCH),
        form_of=_update,
        candidates={
            COMPILED: compiled("adamw_"),
            apex.APEX: Candidate(apex.why_not(apex.OPTIMIZERS)),
        },
        dtypes=LOW_PRECISION,
        shapes=LISTS,
        own=_weights,
    ),
    Entry(
        name="sum of squares",
        operator="sum_of_squares",
        make=lambda shape, dtype, random: [random(shape[1]) for _ in range(shape[0])],
        plain=lambda *tensors: PLAIN_TORCH.sum_of_squares(tensors),
        form_of=lambda operators: lambda *tensors: operators.sum_of_squares(tensors),
        candidates={COMPILED: compiled("sum_of_squares")},
        shapes=LISTS,
        own=_weights,
    ),
    Entry(
        name="gradients summed in float32",
        operator="accumulate",
        make=_make_product,
        plain=_sum(PLAIN_TORCH),
        form_of=_sum,
        candidates={
            COMPILED: compiled("accumulate_"),
            apex.APEX: Candidate(apex.why_not(apex.WEIGHT_GRADIENTS)),
        },
        dtypes=LOW_PRECISION,
        shapes=ROWS,
        own=lambda run: (run.intermediate_size, run.hidden_size),
    ),
]
