"""Variable-length attention over sequences laid end to end, by the compiled operators (Dao, "FlashAttention-2", 2023).

No matrix of queries x keys is materialised and no key-value head is repeated; tiles that are fully masked by documents,
a window or causality are skipped.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.ops.dropout import CountedMask
from megalite.ops.extension import register, why_not

# The CUDA kernels are compiled for these; the CPU kernels support any head size, and float32 and float64 too.
CUDA_HEAD_SIZES = (64, 96, 128, 256)
CUDA_DTYPES = (torch.bfloat16, torch.float16)


class BlockPositions(NamedTuple):
    """Where blocks of longer sequences stand: `rows` rows of equally many queries, and of equally many keys.

    first_query, first_key: the position, in its sequence, of each row's first query and first key. A row may hold
    several documents, each with its own entry in both cu_seqlens: a document that has ended before the block's first
    query has keys and no queries, and one that begins after its last key queries and no keys.
    """

    rows: int
    first_query: int
    first_key: int


class PackedForm(NamedTuple):
    """The arguments of `packed_attention` beside the tensors; positions: instead of alignment at the ends."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    window_size: tuple[int, int]
    scale: float
    deterministic: bool = True
    mask: CountedMask | None = None
    positions: BlockPositions | None = None

    def arguments(self) -> tuple[Any, ...]:
        """Return the operators' arguments behind their tensors."""
        settings = (*self[:4], *self.window_size, self.scale, self.deterministic)
        if self.mask is None:
            return (*settings, None, 0, 0, 0, 0, *(self.positions or _AT_THE_ENDS))
        mask, samples = self.mask, self.mask.sample_indices
        positions = self.positions or _AT_THE_ENDS._replace(rows=len(samples))
        return (*settings, samples, mask.dropped, *mask.key, mask.heads.start, *positions)


_AT_THE_ENDS = BlockPositions(rows=1, first_query=-1, first_key=0)


def why_not_packed(query: Tensor, *, dropout: bool = False) -> str:
    """Return why `packed_attention` does not support tensors like `query`; empty if it does. dropout: with a mask."""
    kind = query.device.type
    if kind == "cuda" and query.dtype not in CUDA_DTYPES:
        return f"its CUDA kernels are for 16-bit types, not {query.dtype}"
    if kind == "cuda" and query.shape[-1] not in CUDA_HEAD_SIZES:
        return f"its CUDA kernels are for heads of {CUDA_HEAD_SIZES}, not {query.shape[-1]}"
    complaint = "" if kind == "meta" else why_not(kind)
    return complaint if complaint or kind != "cuda" else _why_too_large(query, dropout)


def _why_too_large(query: Tensor, dropout: bool) -> str:
    """Return why the kernels do not fit the card's shared memory, 99 KiB per thread block on 8.6, 8.9 and 12.0."""
    chip: Any = torch.cuda.get_device_properties(query.device)  # its type stub lacks some properties
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
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    deterministic: bool = True,
    mask: CountedMask | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale Q K^T) V within each sequence, and the softmax's log-sum-exp.

    query: [tokens, heads, D]; key, value: [key tokens, kv heads, D], possibly views of a packed projection; heads is a
    multiple of kv heads. cu_seqlens_q, cu_seqlens_k: [sequences + 1] int32: the first token of each sequence, then the
    number of tokens. max_seqlen_q, max_seqlen_k: tokens of the longest sequence. window_size: the number of keys before
    and after its own position that a query sees (-1: all); positions are aligned at the ends of queries and keys.
    scale: above 0, 1 / sqrt(D) by default.
    deterministic: sum the gradient of `query` in a fixed order on a GPU; with a mask, and for heads of 256, the order
    is always fixed.
    mask: the dropout mask of the normalised probabilities. Queries and keys are then rows of equal length, one row per
    sample of the mask, and positions count from the row's start. The mask takes no memory: the backward draws it again.

    Returns the output [tokens, heads, D] and the log-sum-exp [heads, tokens] float32 (float64 for float64); 0 and -inf
    for a query that sees no key. Both have gradients. All other memory is linear in the number of tokens.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    form = PackedForm(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window_size, scale, deterministic, mask
    )
    return packed_block(query, key, value, form)


def packed_block(query: Tensor, key: Tensor, value: Tensor, form: PackedForm) -> tuple[Tensor, Tensor]:
    """Same as `packed_attention`."""
    output, lse = _attention(query, key, value, *form.arguments())
    return output, lse


def packed_gradients(
    output_grad: Tensor,
    heads: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    form: PackedForm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `heads`: query, key and value of a block; outside autograd.

    results: output and log-sum-exp of softmax over all keys, of which these may be a part: gradients of the query are
    then to be summed over the parts.
    """
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.megalite.attention_backward(
        output_grad, None, *heads, *results, *form.arguments()
    )
    return grads


def _fake_forward(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    compute_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=compute_dtype)
    return query.new_empty(query.shape), lse


def _fake_backward(
    output_grad: Tensor, lse_grad: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.settings, (sample_indices, *ctx.drop) = inputs[:5], inputs[5:11], inputs[11:]
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:], sample_indices)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, output_grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Any, ...]:
    *tensors, sample_indices = ctx.saved_tensors
    output = tensors[3]
    grads = torch.ops.megalite.attention_backward(
        torch.zeros_like(output) if output_grad is None else output_grad,
        lse_grad,
        *tensors,
        *ctx.settings,
        sample_indices,
        *ctx.drop,
    )
    return (*grads, *(None,) * 16)


_attention = register("attention_forward", _fake_forward, _backward, _keep)
register("attention_backward", _fake_backward)
