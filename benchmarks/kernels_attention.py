"""Attention: our compiled operator against torch's own on the CPU.

    python -m benchmarks.kernels_attention [--quick]

2 rows of 1024 tokens, 8 heads of 64, float32, causal, on two threads. Documents are of 200 tokens; "torch" attends to
each by a call of its own, and has a mask written out for the window, as the model does. Where probabilities are
dropped, 0.1 of them, there are 4 rows, and torch draws the mask and writes the probabilities out.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.kernel_timing import Case, run
from megalite.ops.attention import causal_attention, compiled_attention, document_cu_seqlens, document_spans
from megalite.ops.attention_form import AttentionForm
from megalite.ops.counter import MASK_LEVELS
from megalite.ops.documents import Documents
from megalite.ops.dropout import CountedMask

ROWS, LENGTH, HEADS, HEAD_SIZE, DOCUMENT, WINDOW = 2, 1024, 8, 64, 200, 128


def _forms(
    *,
    rows: int = ROWS,
    documents: bool = False,
    window: int | None = None,
    kv_heads: int = HEADS,
    backward: bool = True,
    dropped: bool = False,
) -> Mapping[str, Callable[[], Any]]:
    shapes = [(rows, LENGTH, heads, HEAD_SIZE) for heads in (HEADS, kv_heads, kv_heads)]
    leaves = [torch.randn(shape, requires_grad=backward) for shape in shapes]
    grad = torch.randn(shapes[0])
    ids = (torch.arange(LENGTH) // DOCUMENT).expand(rows, LENGTH)
    spans, starts = (document_spans(ids), document_cu_seqlens(ids)) if documents else (None, None)

    mask = CountedMask((1, 2), torch.arange(rows), range(HEADS), MASK_LEVELS // 10) if dropped else None

    def once(attend: Callable[..., Any] = causal_attention, documents: Documents | None = None) -> Any:
        output = attend(*leaves, AttentionForm(window, documents, mask))
        return torch.autograd.grad(output, leaves, grad) if backward else output

    fused = partial(once, attend=compiled_attention, documents=starts)
    return {"torch": partial(once, documents=spans), "fused": fused}


CASES = [
    Case("causal, forward", partial(_forms, backward=False)),
    Case("causal, forward + backward", _forms),
    Case("causal, 2 key-value heads, forward + backward", partial(_forms, kv_heads=2)),
    Case("documents, forward + backward", partial(_forms, documents=True)),
    Case("window, forward + backward", partial(_forms, window=WINDOW)),
    Case("4 rows, forward + backward", partial(_forms, rows=4)),
    Case("4 rows, dropped, forward", partial(_forms, rows=4, dropped=True, backward=False)),
    Case("4 rows, dropped, forward + backward", partial(_forms, rows=4, dropped=True)),
]

if __name__ == "__main__":
    run("kernels-attention", __doc__, CASES)
