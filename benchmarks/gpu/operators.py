"""The table of operators that the GPU suite checks and times: one entry each."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.ops import norms
from megalite.ops.activations import bias_gelu, geglu, swiglu
from megalite.ops.adamw import accumulate_, adamw_, sum_of_squares
from megalite.ops.attention import Starts, causal_attention
from megalite.ops.counter import MASK_LEVELS
from megalite.ops.dropout import CountedMask
from megalite.ops.packed_attention import why_not_packed
from megalite.ops.rotary import rotary_frequencies, rotary_table, split_and_rotate
from megalite.parallel.cross_entropy import IGNORE_INDEX, LossTerms, vocab_parallel_cross_entropy
from megalite.parallel.mesh import ParallelMesh

Shape = tuple[int, ...]
Form = Callable[..., Any]
WIDE, NARROW = (torch.float32, torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operator:
    """One operator: what goes in, its forms, and what it has to move or to compute.

    make(shape, dtype, random): inputs, where random(*sizes) draws a tensor of that type; the first `gradients` of them
    are differentiated. fused, plain: functions of these that return a tensor or several, and may overwrite inputs;
    plain in float64 is the reference. peers: name -> another form to time beside it. needs: registered operators.
    shapes: what is checked, tiny. timed: the shape of the measurement. bytes, flops: (shape, bytes of an element) ->
    those of a forward and of a backward, each input read and each output written once. targets: the shares of the
    ceiling that a forward and a backward are to reach. joint: both are timed as one, whose figures come first.
    """

    name: str
    needs: tuple[str, ...]
    make: Callable[[Shape, torch.dtype, Form], Sequence[Tensor]]
    fused: Form
    plain: Form
    shapes: tuple[Shape, ...]
    timed: Shape
    gradients: int = 0
    dtypes: tuple[torch.dtype, ...] = WIDE
    peers: Mapping[str, Form] = field(default_factory=dict)
    compiled: bool = True
    joint: bool = False
    bytes: Callable[[Shape, int], tuple[float, float]] | None = None
    flops: Callable[[Shape, int], tuple[float, float]] | None = None
    targets: tuple[float, float] = (0.8, 0.75)

    @property
    def directions(self) -> tuple[str, ...]:
        """What is timed; figures for it stand at the same places of `bytes`, `flops` and `targets`."""
        if self.joint:
            return ("both",)
        return ("forward", "backward") if self.gradients else ("forward",)

    def missing(self) -> list[str]:
        """Those of `needs` that this library does not have."""
        return [name for name in self.needs if not hasattr(torch.ops.megalite, name)]


EPS = 1e-6
ROWS: tuple[Shape, ...] = ((1, 8), (5, 33), (3, 130), (64, 256))
LARGE_ROWS: Shape = (16384, 4096)


def _rows(tensors: int, weights: int) -> Callable[[Shape, torch.dtype, Form], list[Tensor]]:
    """Inputs [rows, columns], then vectors [columns]."""

    def make(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
        return [*(random(*shape) for _ in range(tensors)), *(random(shape[-1]) for _ in range(weights))]

    return make


def _passes(forward: float, backward: float) -> Callable[[Shape, int], tuple[float, float]]:
    """How many times a tensor of the whole shape goes through memory."""
    return lambda shape, size: (forward * shape[0] * shape[1] * size, backward * shape[0] * shape[1] * size)


def _plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _plain_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _plain_rms_norm(total, weight)


def _plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _plain_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, _plain_layer_norm(total, weight, bias)


NORMS = [
    Operator(
        name="RMSNorm",
        needs=("norm", "norm_backward"),
        make=_rows(1, 1),
        fused=lambda x, weight: norms.rms_norm(x, weight, EPS, fused=True),
        plain=_plain_rms_norm,
        peers={"F.rms_norm": _plain_rms_norm},
        gradients=2,
        shapes=ROWS,
        timed=LARGE_ROWS,
        bytes=_passes(2, 3),
        targets=(0.85, 0.75),
    ),
    Operator(
        name="add + RMSNorm",
        needs=("norm", "norm_backward"),
        make=_rows(2, 1),
        fused=lambda x, residual, weight: norms.fused_add_norm(x, residual, weight, None, EPS),
        plain=_plain_add_rms_norm,
        peers={"x + r, F.rms_norm": _plain_add_rms_norm},
        gradients=3,
        shapes=ROWS,
        timed=LARGE_ROWS,
        bytes=_passes(4, 4),
        targets=(0.85, 0.75),
    ),
    Operator(
        name="LayerNorm",
        needs=("norm", "norm_backward"),
        make=_rows(1, 2),
        fused=lambda x, weight, bias: norms.layer_norm(x, weight, bias, EPS, fused=True),
        plain=_plain_layer_norm,
        peers={"F.layer_norm": _plain_layer_norm},
        gradients=3,
        shapes=ROWS,
        timed=LARGE_ROWS,
        bytes=_passes(2, 3),
        targets=(0.85, 0.75),
    ),
    Operator(
        name="add + LayerNorm",
        needs=("norm", "norm_backward"),
        make=_rows(2, 2),
        fused=lambda x, residual, weight, bias: norms.fused_add_norm(x, residual, weight, bias, EPS),
        plain=_plain_add_layer_norm,
        peers={"x + r, F.layer_norm": _plain_add_layer_norm},
        gradients=4,
        shapes=ROWS,
        timed=LARGE_ROWS,
        bytes=_passes(4, 4),
        targets=(0.85, 0.75),
    ),
]


def _plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _plain_geglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


def _plain_bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


GATED_ROWS: tuple[Shape, ...] = ((1, 8), (5, 34), (3, 130), (64, 256))
LARGE_GATED: Shape = (16384, 2 * 5632)

ACTIVATIONS = [
    Operator(
        name="SwiGLU",
        needs=("glu", "glu_backward"),
        make=_rows(1, 0),
        fused=lambda gate_up: swiglu(gate_up, fused=True),
        plain=_plain_swiglu,
        peers={"F.silu(gate) * up": _plain_swiglu, "our autograd node": swiglu},
        gradients=1,
        shapes=GATED_ROWS,
        timed=LARGE_GATED,
        bytes=_passes(1.5, 2.5),
        targets=(0.8, 0.8),
    ),
    Operator(
        name="GeGLU",
        needs=("glu", "glu_backward"),
        make=_rows(1, 0),
        fused=lambda gate_up: geglu(gate_up, fused=True),
        plain=_plain_geglu,
        peers={"F.gelu(gate) * up": _plain_geglu},
        gradients=1,
        shapes=GATED_ROWS,
        timed=LARGE_GATED,
        bytes=_passes(1.5, 2.5),
        targets=(0.8, 0.8),
    ),
    Operator(
        name="bias + GELU (tanh)",
        needs=("bias_gelu", "bias_gelu_backward"),
        make=_rows(1, 1),
        fused=lambda x, bias: bias_gelu(x, bias, approximate="tanh", fused=True),
        plain=_plain_bias_gelu,
        peers={"F.gelu(x + b)": _plain_bias_gelu},
        gradients=2,
        shapes=ROWS,
        timed=LARGE_ROWS,
        bytes=_passes(2, 3),
        targets=(0.8, 0.8),
    ),
]


def _make_rotary(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """The packed projection of four query heads for each key-value head, then the angles of consecutive positions."""
    batch, sequence, key_value_heads, head_dim = shape
    qkv = random(batch, sequence, 6 * key_value_heads, head_dim)
    angles = rotary_table(sequence, rotary_frequencies(head_dim, 10000.0), dtype)
    return [qkv, *(each.view(1, sequence, 1, -1).to(qkv.device) for each in angles)]


def _rotary(interleaved: bool, fused: bool) -> Form:
    def form(qkv: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, ...]:
        key_value_heads = qkv.shape[2] // 6
        heads = (4 * key_value_heads, key_value_heads)
        return split_and_rotate(qkv, *heads, cosines, sines, interleaved=interleaved, fused=fused)

    return form


ROTARY = [
    Operator(
        name=f"rotary embedding, {name}",
        needs=("rotary_split",),
        make=_make_rotary,
        fused=_rotary(interleaved, fused=True),
        plain=_rotary(interleaved, fused=False),
        peers={"torch, one node": _rotary(interleaved, fused=False)},
        gradients=1,
        shapes=((1, 1, 1, 2), (2, 5, 1, 6), (1, 33, 2, 64), (2, 17, 1, 128)),
        timed=(4, 4096, 8, 128),
        bytes=lambda shape, size: (2 * 6 * prod(shape) * size,) * 2,
        targets=(0.8, 0.8),
    )
    for name, interleaved in (("halves", False), ("interleaved", True))
]


def _make_attention(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Four query heads for each key-value head, as of `_causal`."""
    batch, sequence, key_value_heads, head_dim = shape
    query = random(batch, sequence, 4 * key_value_heads, head_dim)
    return [query, *(random(batch, sequence, key_value_heads, head_dim) for _ in range(2))]


def _sdpa(*backends: SDPBackend) -> Form:
    """torch's attention by one of its backends, or whichever it prefers; it knows the groups of heads itself."""

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = (each.transpose(1, 2) for each in (query, key, value))
        with sdpa_kernel([*backends]) if backends else nullcontext():
            attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2)

    return form


def _window(sequence: int) -> int:
    return sequence // 4 + 5


def _document(sequence: int) -> int:
    return sequence // 3 + 2


def _attention(query: Tensor, key: Tensor, value: Tensor, fused: bool, **seen: Any) -> Tensor:
    """As the model has it, but where it would fall back to torch's: that is not what is to be seen here."""
    if fused and (complaint := why_not_packed(query)):
        raise LookupError(complaint)
    return causal_attention(query, key, value, fused=fused, **seen)


def _without_hopper(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Ours by the kernel for every chip, on a Hopper GPU too, to compare the two."""
    before = os.environ.pop("MEGALITE_NO_HOPPER", "")
    os.environ["MEGALITE_NO_HOPPER"] = "1"
    try:
        return _attention(query, key, value, fused=True)
    finally:
        os.environ["MEGALITE_NO_HOPPER"] = before


def _windowed(fused: bool) -> Form:
    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attention(query, key, value, fused, window=_window(query.shape[1]))

    return form


def _make_documents(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """As of `_make_attention`, and where documents begin: some in each row, the last the shortest."""
    heads = _make_attention(shape, dtype, random)
    rows, length = shape[:2]
    starts = [row * length + at for row in range(rows) for at in range(0, length, _document(length))]
    return [*heads, torch.tensor([*starts, rows * length], dtype=torch.int32, device=heads[0].device)]


def _documents(fused: bool) -> Form:
    def form(query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> Tensor:
        documents = Starts(places, min(_document(query.shape[1]), query.shape[1]))
        return _attention(query, key, value, fused, documents=documents)

    return form


def _make_dropped(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """As of `_make_attention`, and the number of each row's sample."""
    heads = _make_attention(shape, dtype, random)
    return [*heads, torch.arange(7, 7 + shape[0], device=heads[0].device)]


def _dropped(fused: bool) -> Form:
    def form(query: Tensor, key: Tensor, value: Tensor, samples: Tensor) -> Tensor:
        mask = CountedMask((11, 13), samples, range(query.shape[2]), round(0.1 * MASK_LEVELS))
        drawn = mask if fused else mask.draw(query.shape[1], key.shape[1])
        return _attention(query, key, value, fused, mask=drawn)

    return form


def _causal_flops(shape: Shape, seen: float) -> tuple[float, float]:
    """Two products of `seen` keys a query forward, five backward: as FlashAttention counts them."""
    batch, sequence, key_value_heads, head_dim = shape
    product = 2 * batch * sequence * seen * 4 * key_value_heads * head_dim
    return 2 * product, 5 * product


ATTENTION_NEEDS = ("attention_forward", "attention_backward")
ATTENTION_SHAPES: tuple[Shape, ...] = (
    *((1, 1, 1, 64), (2, 65, 1, 64), (1, 200, 2, 64), (2, 129, 1, 128)),
    *((1, 200, 1, 96), (1, 100, 1, 256)),
    *((1, 700, 1, 64), (1, 450, 1, 128)),  # longer than what a block of the Hopper kernel holds of the keys
)

ATTENTION = [
    Operator(
        name="attention, causal",
        needs=ATTENTION_NEEDS,
        make=_make_attention,
        fused=lambda *heads: _attention(*heads, fused=True),
        plain=_sdpa(),
        peers={
            "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION),
            "SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION),
        },
        compiled=False,
        dtypes=NARROW,
        gradients=3,
        shapes=ATTENTION_SHAPES,
        timed=(2, 8192, 8, 128),
        flops=lambda shape, size: _causal_flops(shape, shape[1] / 2),
        # 500 and 220 TFLOP/s where products reach 790.
        targets=(0.63, 0.28),
    ),
    Operator(
        name="attention, causal, by mma.sync",
        needs=ATTENTION_NEEDS,
        make=_make_attention,
        fused=_without_hopper,
        plain=_sdpa(),
        compiled=False,
        dtypes=NARROW,
        gradients=3,
        shapes=ATTENTION_SHAPES,
        timed=(2, 8192, 8, 128),
        flops=lambda shape, size: _causal_flops(shape, shape[1] / 2),
        # 350 and 220 TFLOP/s where products reach 790.
        targets=(0.44, 0.28),
    ),
    Operator(
        name="attention, sliding window",
        needs=ATTENTION_NEEDS,
        make=_make_attention,
        fused=_windowed(fused=True),
        plain=_windowed(fused=False),
        compiled=False,
        dtypes=NARROW,
        gradients=3,
        shapes=ATTENTION_SHAPES,
        timed=(2, 8192, 8, 128),
        flops=lambda shape, size: _causal_flops(shape, _window(shape[1])),
        targets=(0, 0),
    ),
    Operator(
        name="attention, packed documents",
        needs=ATTENTION_NEEDS,
        make=_make_documents,
        fused=_documents(fused=True),
        plain=_documents(fused=False),
        compiled=False,
        dtypes=NARROW,
        gradients=3,
        shapes=ATTENTION_SHAPES,
        timed=(2, 8192, 8, 128),
        flops=lambda shape, size: _causal_flops(shape, _document(shape[1]) / 2),
        targets=(0, 0),
    ),
    Operator(
        name="attention, dropped",
        needs=ATTENTION_NEEDS,
        make=_make_dropped,
        fused=_dropped(fused=True),
        plain=_dropped(fused=False),
        compiled=False,
        dtypes=NARROW,
        gradients=3,
        shapes=ATTENTION_SHAPES,
        timed=(1, 2048, 8, 128),  # torch writes mask and probabilities out
        flops=lambda shape, size: _causal_flops(shape, shape[1] / 2),
        targets=(0, 0),
    ),
]


def _make_losses(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Logits [tokens, vocabulary], labels of which the last counts nothing, weights with a 0 among them."""
    logits = 4 * random(*shape)
    labels = torch.arange(shape[0], device=logits.device).mul_(7919).remainder_(shape[1])
    labels[-1] = IGNORE_INDEX
    weights = torch.ones(shape[0], dtype=torch.promote_types(dtype, torch.float32), device=logits.device)
    weights[shape[0] // 2] = 0
    return [logits, labels, weights]


def _fused_losses(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    mesh, columns = ParallelMesh.single(logits.device), logits.shape[-1]
    batch = (each.unsqueeze(0) for each in (logits, labels, weights))
    losses = vocab_parallel_cross_entropy(*batch, range(columns), mesh.tp, LossTerms(columns), fused=True)
    return losses.squeeze(0)


def _plain_losses(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    wide = logits.to(weights.dtype)
    return F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="none") * weights


CROSS_ENTROPY = [
    Operator(
        name="cross entropy",
        needs=("cross_entropy_statistics", "cross_entropy_gradient_"),
        make=_make_losses,
        fused=_fused_losses,
        plain=_plain_losses,
        peers={"F.cross_entropy": _plain_losses},
        gradients=1,
        shapes=((1, 2), (5, 33), (7, 1030), (3, 50257)),
        timed=(8192, 131072),
        joint=True,
        # The logits are read twice, and their gradient is written over them.
        bytes=_passes(3, 0),
        targets=(0.75, 0),
    ),
]


RULES: dict[str, Any] = {
    "learning_rate": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 7,
}
# Lists of tensors are drawn as (tensors, elements of each).
LISTS: tuple[Shape, ...] = ((1, 1), (3, 8193), (90, 5), (2, 4099))


def _make_update(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Weights of float32, poisoned copies and gradients of `dtype`, moments."""
    count, size = shape
    weights, gradients = ([random(size) for _ in range(count)] for _ in range(2))
    copies = [torch.full_like(each, torch.nan) for each in gradients]
    means, squares = ([torch.rand_like(each.float()) for each in gradients] for _ in range(2))
    return [*(each.float() for each in weights), *copies, *gradients, *means, *squares]


def _update(fused: bool, scale: float = 0.5) -> Form:
    def form(*tensors: Tensor) -> list[Tensor]:
        count = len(tensors) // 5
        weights, copies, gradients, means, squares = (
            [*tensors[start : start + count]] for start in range(0, len(tensors), count)
        )
        narrow = copies if copies[0].element_size() < 4 else []
        adamw_(weights, narrow, gradients, means, squares, **RULES, gradient_scale=scale, fused=fused)
        return [*weights, *(narrow or [each.clone() for each in weights]), *means, *squares]

    return form


OPTIMIZER = [
    Operator(
        name="AdamW, float32 masters and 16-bit copies",
        needs=("adamw_",),
        make=_make_update,
        fused=_update(fused=True),
        plain=_update(fused=False),
        peers={"scale, AdamW fused, copy": _update(fused=False)},
        compiled=False,
        dtypes=NARROW,
        shapes=LISTS,
        timed=(64, 1 << 22),
        # Weight and moments are read and written, a gradient of 16 bits is read, a copy is written.
        bytes=lambda shape, size: (shape[0] * shape[1] * (6 * 4 + 2 * size), 0),
        targets=(0.85, 0),
    ),
    Operator(
        name="sum of squares",
        needs=("sum_of_squares",),
        make=lambda shape, dtype, random: [random(shape[1]) for _ in range(shape[0])],
        fused=lambda *tensors: sum_of_squares(tensors, fused=True),
        plain=lambda *tensors: sum_of_squares(tensors),
        peers={"a norm for each tensor": lambda *tensors: sum_of_squares(tensors)},
        compiled=False,
        shapes=LISTS,
        timed=(64, 1 << 23),
        bytes=lambda shape, size: (shape[0] * shape[1] * size, 0),
        targets=(0.85, 0),
    ),
    Operator(
        name="gradients summed in float32",
        needs=("accumulate_",),
        make=lambda shape, dtype, random: [random(*shape).float(), random(*shape)],
        fused=lambda total, gradient: (accumulate_(total, gradient, fused=True), total)[1],
        plain=lambda total, gradient: (accumulate_(total, gradient), total)[1],
        peers={"cast, then add": lambda total, gradient: total.add_(gradient.float())},
        compiled=False,
        dtypes=NARROW,
        shapes=ROWS,
        timed=LARGE_ROWS,
        bytes=lambda shape, size: (shape[0] * shape[1] * (8 + size), 0),
        targets=(0.85, 0),
    ),
]

OPERATORS: list[Operator] = [*NORMS, *ROTARY, *ACTIVATIONS, *ATTENTION, *CROSS_ENTROPY, *OPTIMIZER]
