"""Attention: causal, sliding window, documents, soft-capped, with dropout; always with grouped heads.

A shape is (rows, sequence, key-value heads, head size[, query heads per key-value head, window]).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.attention import compiled_attention, why_not_compiled
from megalite.ops.attention_backends import CANDIDATES, Backend
from megalite.ops.attention_form import CAUSAL, AttentionForm
from megalite.ops.choice import COMPILED, PLAIN_TORCH, Operators
from megalite.ops.counter import MASK_LEVELS
from megalite.ops.documents import CuSeqlens
from megalite.ops.dropout import CountedMask
from megalite.ops.packed_attention import why_not_packed
from megalite.selftest.registry import Candidate, Entry, Form, Shape, Workload, compiled

Seen = Callable[..., AttentionForm]
_GROUP, _SOFTCAP = 4, 50.0
SHAPES: tuple[Shape, ...] = (
    *((1, 1, 1, 64), (2, 65, 1, 64), (1, 200, 2, 64), (2, 129, 1, 128)),
    *((1, 200, 1, 96), (1, 100, 1, 256)),
    *((1, 700, 1, 64), (1, 450, 1, 128)),  # more keys than a thread block of the Hopper kernel stages at once
)
NEEDS = ("attention_forward", "attention_backward")


def window_of(sequence: int) -> int:
    """Return the window tested at an odd sequence length."""
    return sequence // 4 + 5


def document_of(sequence: int) -> int:
    """Return the document length tested at a sequence length; the last document of a row is shorter."""
    return sequence // 3 + 2


def make_heads(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Return query, key and value of a shape."""
    batch, sequence, key_value_heads, head_dim, *group = shape
    query = random(batch, sequence, (group[0] if group else _GROUP) * key_value_heads, head_dim)
    return [query, *(random(batch, sequence, key_value_heads, head_dim) for _ in range(2))]


def plain_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention by torch's preferred SDPA backend, which handles grouped heads itself."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def _make_windowed(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Return the heads of `make_heads`, and an empty tensor with one row per key of the window."""
    heads = make_heads(shape[:5], dtype, random)
    return [*heads, heads[0].new_empty(shape[5] if len(shape) > 5 else window_of(shape[1]), 0)]


def _in_window(query: Tensor, window: Tensor) -> AttentionForm:
    return AttentionForm(len(window))


def _capped(query: Tensor, window: Tensor) -> AttentionForm:
    return AttentionForm(len(window), softcap=_SOFTCAP)


def _make_documents(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Return the heads of `make_heads`, and the cu_seqlens of several documents per row, the last one the shortest."""
    heads = make_heads(shape[:5], dtype, random)
    rows, length = shape[:2]
    starts = [row * length + at for row in range(rows) for at in range(0, length, document_of(length))]
    return [*heads, torch.tensor([*starts, rows * length], dtype=torch.int32, device=heads[0].device)]


def _in_documents(query: Tensor, places: Tensor) -> AttentionForm:
    longest = min(document_of(query.shape[1]), query.shape[1])
    return AttentionForm(documents=CuSeqlens(places, longest))


def _other(backend: Backend, seen: Seen) -> Candidate:
    """Return the candidate that computes by another package's backend."""

    def why_not(inputs: Sequence[Tensor]) -> str:
        query, key, _, *more = inputs
        return backend.why_not(query, key, seen(query, *more))

    return Candidate(backend.why_not_on, why_not)


def _make_dropped(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Return the heads of `make_heads`, and the sample number of each row."""
    heads = make_heads(shape[:5], dtype, random)
    return [*heads, torch.arange(7, 7 + shape[0], device=heads[0].device)]


def _drops(query: Tensor, sample_indices: Tensor) -> AttentionForm:
    dropped = round(0.1 * MASK_LEVELS)
    return AttentionForm(mask=CountedMask((11, 13), sample_indices, range(query.shape[2]), dropped))


def _own(applies: Callable[[Workload], bool]) -> Callable[[Workload], Shape | None]:
    """Return the function workload -> shape, None for runs that do not use attention of this form."""

    def own(run: Workload) -> Shape | None:
        if not applies(run):
            return None
        group = run.heads // run.key_value_heads
        return run.rows, run.sequence, run.key_value_heads, run.head_dim, group, run.window or run.sequence

    return own


def _entry(
    name: str,
    make: Callable[[Shape, torch.dtype, Form], list[Tensor]],
    seen: Seen,
    applies: Callable[[Workload], bool],
    candidates: Mapping[str, Candidate],
    operator: str,
    **fields: Any,
) -> Entry:
    """Return the entry of attention. seen: query and the inputs after the heads -> the form of attention."""

    def form_of(operators: Operators) -> Form:
        def form(query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
            heads, seen_form = (query, key, value), seen(query, *more)
            # Where torch is faster on a CPU `attend` leaves the call to torch: torch would be compared with itself.
            if operators.uses(operator) and not why_not_compiled(query, seen_form):
                return compiled_attention(*heads, seen_form)
            return operators.attend(*heads, seen_form)

        return form

    return Entry(
        name=f"attention, {name}",
        operator=operator,
        make=make,
        form_of=form_of,
        candidates=candidates,
        gradients=3,
        units=16.0,  # an online softmax rounds more often than torch's: up to 5 units on a CPU, over 700 keys
        shapes=SHAPES,
        own=_own(applies),
        **{"plain": form_of(PLAIN_TORCH)} | fields,
    )


def _ours(*, dropout: bool = False) -> dict[str, Candidate]:
    def why_not(inputs: Sequence[Tensor]) -> str:
        return why_not_packed(inputs[0], dropout=dropout)

    return {COMPILED: compiled(*NEEDS, why_not=why_not)}


def _theirs(seen: Seen) -> dict[str, Candidate]:
    return {each.name: _other(each, seen) for each in CANDIDATES}


def _plainly(run: Workload) -> bool:
    return not (run.documents or run.dropout or run.softcap)


def _causal(query: Tensor) -> AttentionForm:
    return CAUSAL


ENTRIES = [
    _entry(
        "causal",
        lambda shape, dtype, random: make_heads(shape[:5], dtype, random),
        _causal,
        lambda run: run.full_attention and _plainly(run),
        {**_ours(), **_theirs(_causal)},
        "attention",
        plain=plain_causal,
    ),
    _entry(
        "sliding window",
        _make_windowed,
        _in_window,
        lambda run: run.window is not None and _plainly(run),
        {**_ours(), **_theirs(_in_window)},
        "attention_windows",
    ),
    _entry(
        "packed documents",
        _make_documents,
        _in_documents,
        lambda run: run.documents and not run.dropout and not run.softcap,
        {**_ours(), **_theirs(_in_documents)},
        "attention_documents",
    ),
    _entry(
        "soft-capped",
        _make_windowed,
        _capped,
        lambda run: run.softcap and not run.dropout,
        _theirs(_capped),
        "attention_softcap",
    ),
    _entry(
        "dropped",
        _make_dropped,
        _drops,
        lambda run: run.dropout and not run.softcap,
        _ours(dropout=True),
        "attention_dropout",
    ),
]
