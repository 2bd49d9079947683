"""Rotary embedding: of the packed projection, also in place as in generation, and of heads that were normalised."""

from functools import partial
from math import prod

import torch
from torch import Tensor

from megalite.ops.choice import COMPILED, PLAIN_TORCH, Operators
from megalite.ops.rotary import Rotation, rotary_frequencies, rotary_table
from megalite.selftest.registry import Entry, Form, Shape, Workload, compiled

# Query heads per key-value head; a run's own ratio is the fifth number of its shape.
_GROUP = 4


def _group(shape: Shape) -> int:
    return shape[4] if len(shape) > 4 else _GROUP


def _make(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Return the packed projection, the angles of consecutive positions, and an empty tensor [heads per group, 0]."""
    batch, sequence, key_value_heads, head_dim = shape[:4]
    group = _group(shape)
    qkv = random(batch, sequence, (group + 2) * key_value_heads, head_dim)
    angles = rotary_table(sequence, rotary_frequencies(head_dim, 10000.0), dtype)
    tables = [each.view(1, sequence, 1, -1).to(qkv.device) for each in angles]
    return [qkv, *tables, qkv.new_empty(group, 0)]


def _make_heads(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Return query and key, each in memory of its own, as a norm leaves them, and the angles."""
    qkv, *tables, _ = _make(shape, dtype, random)
    query, key, _ = qkv.split((_group(shape) * shape[2], shape[2], shape[2]), dim=2)
    return [query.contiguous(), key.contiguous(), *tables]


def _form(operators: Operators, interleaved: bool, *, overwrite: bool = False) -> Form:
    def form(qkv: Tensor, cosines: Tensor, sines: Tensor, group: Tensor) -> tuple[Tensor, ...]:
        key_value_heads = qkv.shape[2] // (len(group) + 2)
        heads = (len(group) * key_value_heads, key_value_heads)
        rotated: tuple[Tensor, ...] = operators.rotary.split_and_rotate(
            qkv, *heads, Rotation(cosines, sines, interleaved=interleaved), overwrite=overwrite
        )
        return rotated

    return form


def _in_place(operators: Operators) -> Form:
    return torch.no_grad()(_form(operators, False, overwrite=True))


def _of_heads(operators: Operators) -> Form:
    return lambda query, key, *angles: operators.rotary.rotate(query, key, Rotation(*angles))


def _own(run: Workload, *, qk_norm: bool = False) -> Shape | None:
    if not run.rotary or run.qk_norm != qk_norm:
        return None
    group = run.heads // run.key_value_heads
    return run.rows, run.sequence, run.key_value_heads, run.head_dim, group


def moved_elements(entry: Entry, shape: Shape) -> int:
    """Return the number of elements that are read and written: the packed projection's, or those that are rotated."""
    return prod(shape[:4]) * (_group(shape) + (2 if entry in _PACKED else 1))


_SHAPES: tuple[Shape, ...] = ((1, 1, 1, 2), (2, 5, 1, 6), (1, 33, 2, 64), (2, 17, 1, 128))
_PACKED = [
    Entry(
        name=f"rotary embedding, {name}",
        operator="rotary",
        make=_make,
        plain=_form(PLAIN_TORCH, interleaved),
        form_of=partial(_form, interleaved=interleaved),
        candidates={COMPILED: compiled("rotary_split", "rotary_split_backward")},
        gradients=1,
        shapes=_SHAPES,
        own=lambda run, interleaved=interleaved: None if interleaved else _own(run),  # type: ignore[misc]
    )
    for name, interleaved in (("halves", False), ("interleaved", True))
]
_IN_PLACE = Entry(
    name="rotary embedding, in place",
    operator="rotary",
    make=_make,
    plain=_form(PLAIN_TORCH, False),
    form_of=_in_place,
    candidates={COMPILED: compiled("rotary_")},
    shapes=_SHAPES,
    own=_own,
)
_OF_HEADS = Entry(
    name="rotary embedding, split heads",
    operator="rotary",
    make=_make_heads,
    plain=_of_heads(PLAIN_TORCH),
    form_of=_of_heads,
    candidates={COMPILED: compiled("rotary")},
    gradients=2,
    shapes=_SHAPES,
    own=partial(_own, qk_norm=True),
)
ENTRIES = [*_PACKED, _IN_PLACE, _OF_HEADS]
