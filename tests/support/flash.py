"""Stand-ins for a GPU's flash attention kernels: they compute what the documentation defines, on any device.

`torch.nn.attention.varlen` itself runs on them: its operators call `aten::_flash_attention_forward` and its backward.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.support.attention import band


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    scale: float,
    left: int,
    right: int,
    softcap: float = 0.0,
) -> Tensor:
    """Compute attention within each sequence: query i sees keys i + k - q - left to i + k - q + right, both included.

    Follows FlashAttention's README and checks its conditions: int32 cu_seqlens on the tensors' device, a contiguous
    last dim, no sequence longer than max_seqlen, no tokens after the last sequence.
    """
    for starts, tokens, longest in (
        (cu_seqlens_q, len(query), max_seqlen_q),
        (cu_seqlens_k, len(key), max_seqlen_k),
    ):
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts.device == query.device
        assert (
            starts[0] == 0
            and starts[-1] == tokens
            and 0 <= starts.diff().min() <= starts.diff().max() <= longest
        )
    assert all(each.stride(-1) == 1 for each in (query, key, value))
    pieces = []
    for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        _, _, grouped_value, probabilities = _one(
            query[queries], key[keys], value[keys], scale, left, right, softcap
        )
        pieces.append((probabilities @ grouped_value).transpose(0, 1))
    return torch.cat(pieces)


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    of_queries, of_keys = (pairwise(each.tolist()) for each in (cu_seqlens_q, cu_seqlens_k))
    for queries, keys in zip(of_queries, of_keys, strict=True):
        yield slice(*queries), slice(*keys)


def _one(
    query: Tensor, key: Tensor, value: Tensor, scale: float, left: int, right: int, softcap: float = 0.0
) -> tuple[Tensor, ...]:
    """Return query, key and value [heads, tokens, D] of one sequence, and the probabilities."""
    group = query.shape[1] // key.shape[1]
    q = query.transpose(0, 1)
    k, v = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (key, value))
    scores = q @ k.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    mask = band(range(len(key) - len(query), len(key)), range(len(key)), left, right).to(query.device)
    return q, k, v, scores.masked_fill(~mask, float("-inf")).softmax(-1)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unused: Any,
) -> tuple[Tensor, ...]:
    assert dropout_p == 0 and scale is not None and window_size_left is not None
    right = 0 if is_causal else window_size_right
    assert right is not None
    output = flash(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, scale=scale, left=window_size_left, right=right
    )
    empty = query.new_empty(0)
    return output, query.new_zeros(query.shape[1], len(query)), empty, empty, empty


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    """Compute the gradients by hand, because autograd does not run inside an operator's backward."""
    right, kv_heads = 0 if is_causal else window_size_right, key.shape[1]
    grads = [torch.empty_like(each) for each in (query, key, value)]
    for queries, keys in _sequences(cum_seq_q, cum_seq_k):
        q, k, v, p = _one(query[queries], key[keys], value[keys], scale, window_size_left, right)
        g = grad[queries].transpose(0, 1)
        p_grad = g @ v.transpose(1, 2)
        score_grad = p * (p_grad - (p * p_grad).sum(-1, keepdim=True)) * scale
        of_heads = score_grad @ k, score_grad.transpose(1, 2) @ q, p.transpose(1, 2) @ g
        grads[0][queries] = of_heads[0].transpose(0, 1)
        for whole, each in zip(grads[1:], of_heads[1:], strict=True):
            whole[keys] = each.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)
    return tuple(grads)


@contextmanager
def flash_kernels(dispatch_key: str = "CPU") -> Iterator[None]:
    """Register the stand-ins as torch's flash kernels for this dispatch key."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, dispatch_key)
    library.impl("_flash_attention_backward", _backward, dispatch_key)
    try:
        yield
    finally:
        library._destroy()


def _flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert dropout_p == 0 and softmax_scale is not None and alibi_slopes is None and block_table is None
    return flash(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        scale=softmax_scale,
        left=window_size[0],
        right=0 if causal else window_size[1],
        softcap=softcap,
    )


def fake_flash_attn() -> dict[str, ModuleType]:
    """For `sys.modules`: FlashAttention 2 with the parameters of 2.8's own function."""
    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = _flash_attn_varlen_func  # type: ignore[attr-defined]
    assert "flash_attn" not in sys.modules
    return {"flash_attn": module}


def fake_newer_flash() -> dict[str, ModuleType]:
    """For `sys.modules`: FlashAttention 3, and 4, which returns the log-sum-exp too."""

    def fa3(*heads: Tensor, window_size: tuple[int, int], **how: Any) -> Tensor:
        assert None not in window_size
        return _flash_attn_varlen_func(*heads, window_size=window_size, **how)

    def fa4(*heads: Tensor, window_size: tuple[int | None, int | None], **how: Any) -> tuple[Tensor, None]:
        assert -1 not in window_size
        left, right = (-1 if size is None else size for size in window_size)
        return _flash_attn_varlen_func(*heads, window_size=(left, right), **how), None

    modules = {}
    for name, function in (("flash_attn_interface", fa3), ("flash_attn.cute.interface", fa4)):
        modules[name] = ModuleType(name)
        modules[name].__spec__ = ModuleSpec(name, None)
        modules[name].flash_attn_varlen_func = function  # type: ignore[attr-defined]
    return modules
