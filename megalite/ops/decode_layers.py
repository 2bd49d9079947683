"""A stack of decoder layers in one call, for the new tokens of a decode step on a CPU (csrc/decode_layers.h)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.ops import extension


@dataclass(frozen=True)
class LayerForm:
    """The form that all layers of a stack have.

    present: the tensors that a layer has beside its weights, as bits of `PRESENT`. activation: a code of
    ops/activations.py, of a gated MLP or of a plain one. scale, softcap: of attention; softcap: 0 for none.
    """

    present: int
    heads: int
    prefix: int
    activation: int
    gated: bool
    eps: float
    scale: float
    softcap: float


# The optional tensors of a layer, in their order; each has the bit of its place. A bias of one norm means both.
PRESENT = (
    "input_layernorm.bias",
    "self_attn.qkv_proj.scale",
    "self_attn.qkv_proj.bias",
    "self_attn.o_proj.scale",
    "self_attn.o_proj.bias",
    "mlp.up.scale",
    "mlp.up.bias",
    "mlp.down.scale",
    "mlp.down.bias",
)


def decode_layers(
    hidden_states: Tensor,
    tensors: Sequence[Tensor],
    caches: Sequence[Tensor],
    lengths: Tensor,
    angles: Sequence[Tensor],
    windows: Sequence[int | None],
    turns: Sequence[int],
    form: LayerForm,
) -> Tensor:
    """Return the output [n, H] of the layers for hidden states [n, H], to the bit as by one operator after another.

    tensors: of each layer, in order: norm, query-key-value, output, norm, gate-up or up, down; of a norm weight and
    bias, of a linear weight, scale and bias, where `form` has them. caches: of each layer, as of
    ops.decode_attention, with lengths [n]; the new keys and values are written into them. angles: cosines and sines
    [n, head_dim / 2] in turn. turns: of each layer, which pair it takes; -1: none.
    """
    output: Tensor = torch.ops.megalite.decode_layers(
        hidden_states,
        tensors,
        caches,
        lengths,
        angles,
        [-1 if each is None else each for each in windows],
        turns,
        form.present,
        form.heads,
        form.prefix,
        form.activation,
        form.gated,
        form.eps,
        form.scale,
        form.softcap,
    )
    return output


def _fake(hidden_states: Tensor, *others: object) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


extension.register("decode_layers", _fake)
