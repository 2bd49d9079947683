"""Attention sinks: one trained logit a head in the denominator of the softmax (OpenAI 2025, "gpt-oss model card").

Softmax over the scores and the logit is softmax over the scores alone, scaled by what the logit leaves of it: the
log-sum-exp grows, and outputs shrink. The gradients of query, key and value are then a block's own
(ops/context_ring.py), which need the output and the log-sum-exp of the whole softmax and no others.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.ops.context_ring import AttentionBlock, BlockForm, attend_block, block_gradients, merge_block


def attend_with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, form: BlockForm) -> Tensor:
    """Return the attention of the last S of `form.length` positions to all of them: [B, S, heads, D].

    query: [B, S, heads, D]; key, value: [B, form.length, kv heads, D]; sinks: [heads]. form: its documents are those of
    the keys.
    """
    attended: Tensor = _SinkAttention.apply(query, key, value, sinks, form)
    return attended


def only_sinks(query: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of queries [B, n, heads, D] that have seen no key yet, for `merge_block`.

    At least float32. sinks: [heads]; None: there are none.
    """
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_full((query.shape[2], *query.shape[:2]), -torch.inf, dtype=compute_dtype)
    if sinks is not None:
        lse.copy_(sinks[:, None, None])
    return query.new_zeros(query.shape, dtype=compute_dtype), lse


def sink_gradients(output_grad: Tensor, results: tuple[Tensor, Tensor], sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks [heads]: minus the sink's probability times grad * output, over all queries.

    results: output [B, n, heads, D] and log-sum-exp [heads, B, n] of each query, the sink in both.
    """
    output, lse = results
    weights = (output_grad * output).sum(-1, dtype=lse.dtype).permute(2, 0, 1)
    probabilities = torch.exp(sinks.to(lse.dtype)[:, None, None] - lse)
    return (probabilities * weights).sum((1, 2)).neg().to(sinks.dtype)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, form: BlockForm
    ) -> Tensor:
        output, lse = only_sinks(query, sinks)
        merge_block(output, lse, *attend_block(query, key, value, _block(query, form), form))
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.form = form
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, *results = ctx.saved_tensors
        block, heads, whole = _block(query, ctx.form), (query, key, value), (results[0], results[1])
        grads = block_gradients(output_grad, heads, whole, block, ctx.form)
        of_heads = (grad.to(each.dtype) for grad, each in zip(grads, heads, strict=True))
        return *of_heads, sink_gradients(output_grad, whole, sinks), None


def _block(query: Tensor, form: BlockForm) -> AttentionBlock:
    return AttentionBlock(range(form.length - query.shape[1], form.length), range(form.length))
