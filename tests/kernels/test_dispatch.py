"""The calls of compiled operators: torch's numbers and gradients to the bit, without torch.library's Python."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from megalite.ops import extension
from megalite.ops.activations import GELU, SILU, compiled_bias_gelu, compiled_swiglu
from megalite.ops.expert_rows import RowOrder, rows_of_tokens, tokens_of_rows
from megalite.ops.norms import compiled_add_norm
from megalite.ops.packed_attention import packed_attention
from megalite.ops.rotary import Rotation, compiled_rotate, compiled_split_and_rotate
from tests.support.kernels import needs_library

pytestmark = needs_library
COSINES, SINES = torch.rand(2, 1, 6, 1, 4)
ROTATION = Rotation(COSINES, SINES)
ORDER = RowOrder.of(torch.tensor([[2, 0], [1, 2], [0, 1]]), compiled=True)
ENDS = torch.tensor([0, 6], dtype=torch.int32)

# Operator -> our call, the shapes of its tensors, and the arguments of the operator behind them.
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], tuple[Any, ...]]] = {
    "norm": (lambda *tensors: compiled_add_norm(*tensors, 1e-5), [(6, 8), (6, 8), (8,), (8,)], (1e-5,)),
    "glu": (compiled_swiglu, [(6, 16)], (SILU,)),
    "bias_gelu": (compiled_bias_gelu, [(6, 16), (16,)], (GELU["none"],)),
    "expert_rows": (lambda tokens: rows_of_tokens(tokens, ORDER), [(3, 8)], (ORDER.rows,)),
    "expert_sums": (
        lambda rows, weights: tokens_of_rows(rows, weights, ORDER),
        [(6, 8), (3, 2)],
        (ORDER.rows,),
    ),
    "rotary_split": (
        lambda qkv: compiled_split_and_rotate(qkv, 4, 2, ROTATION),
        [(1, 6, 8, 8)],
        (4, 2, COSINES, SINES, None, False),
    ),
    "rotary": (
        lambda query, key: compiled_rotate(query, key, ROTATION),
        [(1, 6, 4, 8), (1, 6, 2, 8)],
        (COSINES, SINES, None, False, False),
    ),
    "attention_forward": (
        lambda *heads: packed_attention(*heads, ENDS, ENDS, max_seqlen_q=6, max_seqlen_k=6, scale=0.3),
        [(6, 4, 8), (6, 2, 8), (6, 2, 8)],
        (ENDS, ENDS, 6, 6, -1, -1, 0.3, True, None, 0, 0, 0, 0, 1, -1, 0),
    ),
}


@contextmanager
def python_of_torch_library() -> Iterator[list[str]]:
    """List the Python functions of torch.library that are called within."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/torch/_library/" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)


def tensors_of(operator: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) for shape in CALLS[operator][1]]


def operator_of(name: str) -> Callable[..., list[Tensor]]:
    """Return the operator as torch.library calls it, without outputs that are for its backward alone."""
    operator, rest = getattr(torch.ops.megalite, name), CALLS[name][2]
    return lambda *tensors: listed(operator(*tensors, *rest))[: 2 if name == "norm" else None]


def listed(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def with_all(run: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Return outputs and gradients."""
    inputs = [each.clone().requires_grad_() for each in tensors]
    outputs = listed(run(*inputs))
    grads = [torch.linspace(-1, 1, each.numel()).view(each.shape) for each in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]


def require_equal(one: list[Tensor], other: list[Tensor]) -> None:
    for found, expected in zip(one, other, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("operator", CALLS)
def test_numbers_and_gradients_are_those_of_torch_library(operator: str) -> None:
    tensors = tensors_of(operator)
    with python_of_torch_library() as called:
        found = with_all(CALLS[operator][0], tensors)
    assert not called
    with python_of_torch_library() as called:
        expected = with_all(operator_of(operator), tensors)
    assert "autograd_impl" in called, "torch.library calls this no more: the test sees nothing"
    require_equal(found, expected)


@pytest.mark.parametrize("operator", CALLS)
def test_without_gradients_there_is_no_node(operator: str) -> None:
    tensors = [each.requires_grad_() for each in tensors_of(operator)]
    with torch.no_grad(), python_of_torch_library() as called:
        outputs = listed(CALLS[operator][0](*tensors))
    assert not called and not any(each.requires_grad for each in outputs)
    require_equal(outputs, operator_of(operator)(*tensors))


def test_every_operator_with_a_gradient_is_called_so() -> None:
    """Those whose call is torch.library's own node would be slow again."""
    names = {name for name in dir(torch.ops.megalite) if not name.startswith("_") and name not in CALLS}
    registered = [torch._C._dispatch_dump(f"megalite::{name}") for name in names]
    assert not [each.splitlines()[0] for each in registered if "Autograd" in each]


def test_a_frozen_input_has_no_gradient() -> None:
    x, residual, weight, bias = tensors_of("norm")
    weight.requires_grad_()
    ours, theirs = (run(x, residual, weight, bias)[1] for run in (CALLS["norm"][0], operator_of("norm")))
    require_equal(*(list(torch.autograd.grad(each.sum(), [weight])) for each in (ours, theirs)))


def test_a_recomputed_region_gives_the_same() -> None:
    """The node saves its tensors by the hooks of a recomputed region."""

    def run(x: Tensor) -> Tensor:
        return compiled_swiglu(x) * 2

    def recomputed(x: Tensor) -> Tensor:
        again: Tensor = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
        return again

    require_equal(*(with_all(each, tensors_of("glu")) for each in (recomputed, run)))


@pytest.mark.parametrize("operator", CALLS)
def test_without_torchs_guard_the_numbers_are_the_same(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = with_all(operator_of(operator), tensors_of(operator))
    monkeypatch.setattr(extension, "_BELOW_AUTOGRAD", nullcontext)
    require_equal(with_all(CALLS[operator][0], tensors_of(operator)), expected)


def test_a_library_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "load", lambda: "it was not built")
    with pytest.raises(RuntimeError, match="not loaded: it was not built"):
        extension.register("norm", lambda: None)(1, 2)
