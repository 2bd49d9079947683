"""Attention over sequences laid end to end, by the compiled operators (Dao, "FlashAttention-2", 2023).

No matrix of queries x keys exists, nor are key-value heads repeated; what documents, a window or a causal mask do
not let be seen is not worked on.
"""

from typing import Any

import torch
from torch import Tensor

from megalite.ops.dropout import CountedMask
from megalite.ops.extension import register, why_not

# What the CUDA kernels are compiled for; the CPU's take any size, and float32 and float64 too.
CUDA_HEAD_SIZES = (64, 96, 128, 256)
CUDA_DTYPES = (torch.bfloat16, torch.float16)


def why_not_packed(query: Tensor, *, dropout: bool = False) -> str:
    """Why `packed_attention` cannot be computed for tensors like `query`; empty where it can. dropout: with a mask."""
    kind = query.device.type
    if kind == "cuda" and query.dtype not in CUDA_DTYPES:
        return f"its CUDA kernels are for 16-bit types, not {query.dtype}"
    if kind == "cuda" and query.shape[-1] not in CUDA_HEAD_SIZES:
        return f"its CUDA kernels are for heads of {CUDA_HEAD_SIZES}, not {query.shape[-1]}"
    complaint = "" if kind == "meta" else why_not(kind)
    return complaint if complaint or kind != "cuda" else _why_too_large(query, dropout)


def _why_too_large(query: Tensor, dropout: bool) -> str:
    """Why the kernels do not fit the shared memory of this NVIDIA card: 8.6, 8.9 and 12.0 have 99 KiB a block."""
    chip: Any = torch.cuda.get_device_properties(query.device)  # whose type does not list them all
    limit = chip.shared_memory_per_block_optin
    needed = max(
        torch.ops.megalite.attention_shared_memory(query.shape[-1], dropout, backward, False, limit)
        for backward in (False, True)
    )
    if needed <= limit:
        return ""
    return (
        f"its CUDA kernels for heads of {query.shape[-1]}{', with dropout,' if dropout else ''} take {needed} bytes of "
        f"shared memory, a block has {limit} on this chip"
    )


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *,
    longest_query: int,
    longest_key: int,
    left: int = -1,
    right: int = -1,
    scale: float | None = None,
    deterministic: bool = True,
    mask: CountedMask | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale Q K^T) V within each sequence, and the log of the softmax's sums.

    query: [tokens, heads, D]; key, value: [key tokens, kv heads, D], views of a packed projection too; heads is a
    multiple of kv heads. query_starts, key_starts: [sequences + 1] int32, where each sequence begins, and the end;
    longest_query, longest_key: tokens of the longest one. A query of sequence n sees `left` keys before its own place
    and `right` behind it (-1: all), aligned at the ends of both. scale: above 0, 1 / sqrt(D) by default.
    deterministic: the gradient of `query` is summed in one order, where a GPU would else take any; with a mask, and
    for heads of 256, it always is.
    mask: of the probabilities to drop, once normalised; queries, and keys, are those of as many rows of equal length
    as it has samples, and their positions count from a row's start. It costs no memory: the backward draws it again.

    Returns [tokens, heads, D], 0 where nothing is seen, and [heads, tokens] float32 (float64 for float64), -inf there.
    Both have gradients. Memory but for these is in proportion to the tokens.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    drop = (None, 0, 0, 0, 0) if mask is None else (mask.samples, mask.dropped, *mask.key, mask.heads.start)
    output, lse = torch.ops.megalite.attention_forward(
        query,
        key,
        value,
        query_starts,
        key_starts,
        longest_query,
        longest_key,
        left,
        right,
        scale,
        deterministic,
        *drop,
    )
    return output, lse


def _fake_forward(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=wide)
    return query.new_empty(query.shape), lse


def _fake_backward(
    output_grad: Tensor, lse_grad: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.settings, (samples, *ctx.drop) = inputs[:5], inputs[5:11], inputs[11:]
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:], samples)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, output_grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Any, ...]:
    *tensors, samples = ctx.saved_tensors
    output = tensors[3]
    grads = torch.ops.megalite.attention_backward(
        torch.zeros_like(output) if output_grad is None else output_grad,
        lse_grad,
        *tensors,
        *ctx.settings,
        samples,
        *ctx.drop,
    )
    return (*grads, *(None,) * 13)


register("attention_forward", _fake_forward, _backward, _keep)
register("attention_backward", _fake_backward)
