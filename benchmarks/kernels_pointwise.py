"""Rotary embedding, gated activations and bias + GELU, forward and backward: compiled, plain torch, torch.compile.

4096 tokens in float32. "eager" is the formula as transformers writes it, "compiled" the same through torch.compile,
"plain" our own plain form.

    python -m benchmarks.kernels_pointwise
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_timing import Case, run
from megalite.ops.activations import (
    bias_gelu,
    compiled_bias_gelu,
    compiled_geglu,
    compiled_swiglu,
    geglu,
    swiglu,
)
from megalite.ops.rotary import (
    Rotation,
    compiled_rotate,
    compiled_split_and_rotate,
    rotary_frequencies,
    rotary_table,
    rotate,
    split_and_rotate,
)

TOKENS, HEADS, HEAD_DIM = 4096, 16, 64
HIDDEN, GATED = 1024, 2816

Form = Callable[..., Any]


def _both_ways(form: Form, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Callable[[], Any]:
    """form(*inputs) and its gradients, from inputs whose memory the forms share."""

    def once() -> Any:
        made = form(*inputs)
        outputs = [made] if isinstance(made, Tensor) else list(made)
        return torch.autograd.grad(outputs, [each for each in inputs if each.requires_grad], grads)

    return once


def _forms(eager: Form, plain: Form, fused: Form, inputs: list[Tensor]) -> dict[str, Callable[[], Any]]:
    made = eager(*inputs)
    grads = [torch.randn_like(each) for each in ([made] if isinstance(made, Tensor) else made)]
    forms = {"eager": eager, "plain": plain, "compiled": torch.compile(eager), "fused": fused}
    return {name: _both_ways(form, inputs, grads) for name, form in forms.items()}


def _rotate_half(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _eager_rotary(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    cosines, sines = (torch.cat((each, each), dim=-1) for each in (cosines, sines))
    return query * cosines + _rotate_half(query) * sines, key * cosines + _rotate_half(key) * sines


def _eager_split(qkv: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = qkv.split(HEADS, dim=2)
    return *_eager_rotary(query, key, cosines, sines), value


def _angles() -> list[Tensor]:
    tables = rotary_table(TOKENS, rotary_frequencies(HEAD_DIM, 10_000.0), torch.float32)
    return [each[None, :, None] for each in tables]


def _heads(count: int) -> Tensor:
    return torch.randn(1, TOKENS, count, HEAD_DIM, requires_grad=True)


def _rotary() -> dict[str, Callable[[], Any]]:
    def ours(run: Form) -> Form:
        return lambda query, key, cosines, sines: run(query, key, Rotation(cosines, sines))

    inputs = [_heads(HEADS), _heads(HEADS), *_angles()]
    return _forms(_eager_rotary, ours(rotate), ours(compiled_rotate), inputs)


def _split() -> dict[str, Callable[[], Any]]:
    def ours(run: Form) -> Form:
        return lambda qkv, cosines, sines: run(qkv, HEADS, HEADS, Rotation(cosines, sines))

    plain, compiled = ours(split_and_rotate), ours(compiled_split_and_rotate)
    return _forms(_eager_split, plain, compiled, [_heads(3 * HEADS), *_angles()])


def _gated(eager: Callable[[Tensor], Tensor], ours: Form, compiled: Form) -> dict[str, Callable[[], Any]]:
    def product(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return eager(gate) * up

    return _forms(product, ours, compiled, [torch.randn(TOKENS, 2 * GATED, requires_grad=True)])


def _bias_gelu(approximate: str) -> dict[str, Callable[[], Any]]:
    inputs = [
        torch.randn(TOKENS, 4 * HIDDEN, requires_grad=True),
        torch.randn(4 * HIDDEN, requires_grad=True),
    ]
    return _forms(
        lambda inputs, bias: F.gelu(inputs + bias, approximate=approximate),
        partial(bias_gelu, approximate=approximate),
        partial(compiled_bias_gelu, approximate=approximate),
        inputs,
    )


ROTARY_TARGETS = {"eager": 5.0, "compiled": 2.0}
CASES = [
    Case("rotary, query and key, 16 heads x 64", _rotary, ROTARY_TARGETS),
    Case("rotary of packed qkv, 3 x 16 heads x 64", _split),
    Case("SwiGLU, 2816", partial(_gated, F.silu, swiglu, compiled_swiglu)),
    Case("GeGLU, 2816", partial(_gated, F.gelu, geglu, compiled_geglu)),
    Case(
        "GeGLU (tanh), 2816",
        partial(
            _gated,
            partial(F.gelu, approximate="tanh"),
            partial(geglu, approximate="tanh"),
            partial(compiled_geglu, approximate="tanh"),
        ),
    ),
    Case("bias + GELU, 4096", partial(_bias_gelu, "none")),
    Case("bias + GELU (tanh), 4096", partial(_bias_gelu, "tanh")),
]

if __name__ == "__main__":
    run("kernels-pointwise", __doc__, CASES)
