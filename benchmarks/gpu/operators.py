"""The operators that the GPU suite checks and times: what megalite selftest proves, with peers and ceilings."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.ops.activations import swiglu
from megalite.ops.adamw import accumulate_, compiled_accumulate_
from megalite.ops.attention import compiled_attention
from megalite.ops.choice import COMPILED
from megalite.selftest import activations, attention, loss, norms, optimizer, rotary
from megalite.selftest.registry import LOW_PRECISION, Candidate, Entry, Form, Shape
from megalite.selftest.rotary import moved_elements


@dataclass(frozen=True)
class Operator:
    """An entry of megalite's own table, and what it is measured against.

    timed: the shape of the measurement. peers: name -> another form to time beside it. bytes, flops: (shape, bytes of
    an element) -> those of a forward and of a backward, each input read and each output written once. targets: the
    shares of the ceiling that a forward and a backward are to reach. joint: both are timed as one, whose figures come
    first. compiled: torch.compile is a peer.
    """

    entry: Entry
    timed: Shape
    peers: Mapping[str, Form] = field(default_factory=dict)
    compiled: bool = True
    joint: bool = False
    bytes: Callable[[Shape, int], tuple[float, float]] | None = None
    flops: Callable[[Shape, int], tuple[float, float]] | None = None
    targets: tuple[float, float] = (0.8, 0.75)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.entry.dtypes

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.entry.shapes

    @property
    def ours(self) -> Candidate:
        return self.entry.candidates[COMPILED]

    @property
    def directions(self) -> tuple[str, ...]:
        """The names of the timings; `bytes`, `flops` and `targets` have the same order."""
        if self.joint:
            return ("both",)
        return ("forward", "backward") if self.entry.gradients else ("forward",)


LARGE_ROWS: Shape = (16384, 4096)
LARGE_GATED: Shape = (16384, 2 * 5632)
ENTRIES = {
    entry.name: entry
    for module in (norms, rotary, activations, attention, loss, optimizer)
    for entry in module.ENTRIES
}


def _passes(forward: float, backward: float) -> Callable[[Shape, int], tuple[float, float]]:
    """How many times a tensor of the whole shape goes through memory."""
    return lambda shape, size: (forward * shape[0] * shape[1] * size, backward * shape[0] * shape[1] * size)


def _rows(name: str, peers: Mapping[str, str | Form], passes: tuple[float, float], **others: Any) -> Operator:
    """One of [rows, columns]; a peer that is not a form is the plain one."""
    entry = ENTRIES[name]
    forms = {peer: entry.plain if isinstance(form, str) else form for peer, form in peers.items()}
    return Operator(entry, **{"timed": LARGE_ROWS} | others, peers=forms, bytes=_passes(*passes))


PLAIN = "the plain form"
NORMS = [
    _rows("RMSNorm", {"F.rms_norm": PLAIN}, (2, 3), targets=(0.85, 0.75)),
    _rows("add + RMSNorm", {"x + r, F.rms_norm": PLAIN}, (4, 4), targets=(0.85, 0.75)),
    _rows("LayerNorm", {"F.layer_norm": PLAIN}, (2, 3), targets=(0.85, 0.75)),
    _rows("add + LayerNorm", {"x + r, F.layer_norm": PLAIN}, (4, 4), targets=(0.85, 0.75)),
]
_GATED: dict[str, Any] = {"timed": LARGE_GATED, "targets": (0.8, 0.8)}
ACTIVATIONS = [
    _rows("SwiGLU", {"F.silu(gate) * up": PLAIN, "our autograd node": swiglu}, (1.5, 2.5), **_GATED),
    _rows("GeGLU", {"F.gelu(gate) * up": PLAIN}, (1.5, 2.5), **_GATED),
    _rows("bias + GELU (tanh)", {"F.gelu(x + b)": PLAIN}, (2, 3), targets=(0.8, 0.8)),
]


def _rotary_bytes(entry: Entry, shape: Shape, size: int) -> tuple[float, float]:
    return (2 * moved_elements(entry, shape) * size,) * 2


ROTARY = [
    Operator(
        entry,
        timed=(4, 4096, 8, 128),
        peers={"torch, one node": entry.plain},
        bytes=partial(_rotary_bytes, entry),
        targets=(0.8, 0.8),
    )
    for entry in rotary.ENTRIES
]


def _sdpa(backend: SDPBackend) -> Form:
    """torch's attention by one of its backends; it knows the groups of heads itself."""

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = (each.transpose(1, 2) for each in (query, key, value))
        with sdpa_kernel([backend]):
            attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2)

    return form


def _without_hopper(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Ours by the kernel for every chip, on a Hopper GPU too, to compare the two."""
    before = os.environ.pop("MEGALITE_NO_HOPPER", "")
    os.environ["MEGALITE_NO_HOPPER"] = "1"
    try:
        return compiled_attention(query, key, value)
    finally:
        os.environ["MEGALITE_NO_HOPPER"] = before


def _causal_flops(shape: Shape, seen: float) -> tuple[float, float]:
    """Two products of `seen` keys a query forward, five backward: as FlashAttention counts them."""
    batch, sequence, key_value_heads, head_dim = shape
    product = 2 * batch * sequence * seen * 4 * key_value_heads * head_dim
    return 2 * product, 5 * product


def _attention(entry: Entry, seen: Callable[[int], float], **others: Any) -> Operator:
    return Operator(
        replace(entry, dtypes=LOW_PRECISION),
        compiled=False,
        flops=lambda shape, size: _causal_flops(shape, seen(shape[1])),
        **{"timed": (2, 8192, 8, 128), "targets": (0, 0)} | others,
    )


CAUSAL = ENTRIES["attention, causal"]
ATTENTION = [
    _attention(
        CAUSAL,
        lambda sequence: sequence / 2,
        peers={
            "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION),
            "SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION),
        },
        # 500 and 220 TFLOP/s where products reach 790.
        targets=(0.63, 0.28),
    ),
    _attention(
        replace(
            CAUSAL,
            name="attention, causal, by mma.sync",
            form_of=lambda operators: _without_hopper,
        ),
        lambda sequence: sequence / 2,
        # 350 and 220 TFLOP/s where products reach 790.
        targets=(0.44, 0.28),
    ),
    _attention(ENTRIES["attention, sliding window"], attention.window_of),
    _attention(ENTRIES["attention, packed documents"], lambda sequence: attention.document_of(sequence) / 2),
    # torch writes mask and probabilities out.
    _attention(ENTRIES["attention, dropped"], lambda sequence: sequence / 2, timed=(1, 2048, 8, 128)),
]
CROSS_ENTROPY = [
    _rows(
        "cross entropy",
        {"F.cross_entropy": PLAIN},
        # The logits are read twice, and their gradient is written over them.
        (3, 0),
        timed=(8192, 131072),
        joint=True,
        targets=(0.75, 0),
    )
]
OPTIMIZER = [
    Operator(
        adamw := ENTRIES["AdamW, float32 masters and 16-bit copies"],
        peers={"scale, AdamW fused, copy": adamw.plain},
        compiled=False,
        timed=(64, 1 << 22),
        # Weight and moments are read and written, a gradient of 16 bits is read, a copy is written.
        bytes=lambda shape, size: (shape[0] * shape[1] * (6 * 4 + 2 * size), 0),
        targets=(0.85, 0),
    ),
    Operator(
        squares := ENTRIES["sum of squares"],
        peers={"a norm for each tensor": squares.plain},
        compiled=False,
        timed=(64, 1 << 23),
        bytes=lambda shape, size: (shape[0] * shape[1] * size, 0),
        targets=(0.85, 0),
    ),
    Operator(
        # The sum alone, without the product that it adds.
        replace(
            ENTRIES["gradients summed in float32"],
            make=lambda shape, dtype, random: [random(*shape).float(), random(*shape)],
            plain=lambda total, gradient: (accumulate_(total, gradient), total)[1],
            form_of=lambda operators: (
                lambda total, gradient: (compiled_accumulate_(total, gradient), total)[1]
            ),
        ),
        peers={"cast, then add": lambda total, gradient: total.add_(gradient.float())},
        compiled=False,
        timed=LARGE_ROWS,
        bytes=lambda shape, size: (shape[0] * shape[1] * (8 + size), 0),
        targets=(0.85, 0),
    ),
]

OPERATORS: list[Operator] = [*NORMS, *ROTARY, *ACTIVATIONS, *ATTENTION, *CROSS_ENTROPY, *OPTIMIZER]
