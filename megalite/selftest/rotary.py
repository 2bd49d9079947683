"""Rotary embedding of the packed projection."""

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


def _form(operators: Operators, interleaved: bool) -> Form:
    def form(qkv: Tensor, cosines: Tensor, sines: Tensor, group: Tensor) -> tuple[Tensor, ...]:
        key_value_heads = qkv.shape[2] // (len(group) + 2)
        heads = (len(group) * key_value_heads, key_value_heads)
        rotated: tuple[Tensor, ...] = operators.rotary.split_and_rotate(
            qkv, *heads, Rotation(cosines, sines, interleaved=interleaved)
        )
        return rotated

    return form


def _own(run: Workload) -> Shape | None:
    if not run.rotary:
        return None
    group = run.heads // run.key_value_heads
    return run.rows, run.sequence, run.key_value_heads, run.head_dim, group


def packed_elements(shape: Shape) -> int:
    """Return the number of elements of the packed projection."""
    return prod(shape[:4]) * (_group(shape) + 2)


ENTRIES = [
    Entry(
        name=f"rotary embedding, {name}",
        operator="rotary",
        make=_make,
        plain=_form(PLAIN_TORCH, interleaved),
        form_of=partial(_form, interleaved=interleaved),
        candidates={COMPILED: compiled("rotary_split", "rotary_split_backward")},
        gradients=1,
        shapes=((1, 1, 1, 2), (2, 5, 1, 6), (1, 33, 2, 64), (2, 17, 1, 128)),
        own=lambda run, interleaved=interleaved: None if interleaved else _own(run),  # type: ignore[misc]
    )
    for name, interleaved in (("halves", False), ("interleaved", True))
]
