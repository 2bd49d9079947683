"""The layers of a chunk as one compiled operator, for decode steps on a CPU: a small model's time is not Python's."""

from collections.abc import Iterator, Sequence
from typing import Self, cast

from torch import Tensor, nn

from megalite.model.kv_cache import CachedStep
from megalite.model.layer import DecoderLayer
from megalite.model.mlp import GatedMLP
from megalite.model.rope import Rotations
from megalite.ops.activations import GELU, SILU
from megalite.ops.choice import Operators
from megalite.ops.decode_attention import compiled_serves
from megalite.ops.decode_layers import PRESENT, LayerForm, decode_layers
from megalite.ops.few_rows import compiled_pays
from megalite.parallel.int8 import Int8Linear
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.topology.shape import ModelShape

Linear = ColumnParallelLinear | RowParallelLinear | Int8Linear


class DecodeStack:
    """Layers whose compiled operators can run in one call. Its tensors are the layers' own."""

    def __init__(self, shape: ModelShape, layers: Sequence[DecoderLayer]):
        self._layers = [each.self_attn.layer for each in layers]
        self._windows = [each.self_attn.window for each in layers]
        self._rotates = [each.self_attn.rotates for each in layers]
        named = [list(_tensors(each)) for each in layers]
        self._tensors = [tensor for each in named for _, tensor in each if tensor is not None]
        self._weights = [each.weight for each in _linears(layers[0])]
        given = {name for name, tensor in named[0] if tensor is not None}
        attention, mlp = layers[0].self_attn, layers[0].mlp
        self._head_dim = shape.head_dim
        self._form = LayerForm(
            present=sum(1 << place for place, name in enumerate(PRESENT) if name in given),
            heads=attention.heads,
            prefix=shape.prefix_tokens,
            activation=SILU
            if isinstance(mlp, GatedMLP) and shape.hidden_act == "silu"
            else GELU["tanh" if shape.hidden_act == "gelu_pytorch_tanh" else "none"],
            gated=isinstance(mlp, GatedMLP),
            eps=shape.rms_norm_eps,
            scale=shape.head_dim**-0.5 if attention.scale is None else attention.scale,
            softcap=attention.softcap or 0.0,
        )

    @classmethod
    def of(cls, shape: ModelShape, layers: Sequence[nn.Module], ops: Operators) -> Self | None:
        """Return the stack of these layers; None if the operator does not have what they compute."""
        found = [each for each in layers if isinstance(each, DecoderLayer)]
        plain = (
            shape.norm_placement == "pre"
            and shape.residual_multiplier == 1
            and not shape.qk_norm
            and not shape.zero_centered_gamma
        )
        names = ("norm", "add_norm", "rotary", "glu" if shape.gated_mlp else "bias_gelu")
        compiled = not ops.compile and all(ops.uses(name) for name in names)
        own = all(_is_alone(each) for layer in found for each in _linears(layer))
        return cls(shape, found) if found and plain and compiled and own else None

    def serves(self, hidden_states: Tensor, step: CachedStep, rotations: Rotations | None) -> bool:
        """Return whether this step has new tokens alone, few enough for the compiled products."""
        return (
            not step.segments
            and compiled_serves(step.cache.of(self._layers[0]))
            and (rotations is None or 2 * rotations.full.cosines.shape[-1] == self._head_dim)
            and all(compiled_pays(hidden_states, each) for each in self._weights)
        )

    def __call__(self, hidden_states: Tensor, step: CachedStep, rotations: Rotations | None) -> Tensor:
        """[1, n, H] -> [1, n, H]; appends to the cache as the layers do."""
        angles = [] if rotations is None else [*rotations.full, *rotations.local]
        turns = [
            -1 if rotations is None or not rotates else int(window is not None)
            for rotates, window in zip(self._rotates, self._windows, strict=True)
        ]
        caches = [step.cache.of(layer) for layer in self._layers]
        output = decode_layers(
            hidden_states[0], self._tensors, caches, step.held, angles, self._windows, turns, self._form
        )
        return output.unsqueeze(0)


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    """Return query-key-value, output, gate-up or up, and down."""
    mlp = layer.mlp
    up = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj
    # int8 linears stand in their places
    return cast(tuple[Linear, ...], (layer.self_attn.qkv_proj, layer.self_attn.o_proj, up, mlp.down_proj))


def _is_alone(linear: Linear) -> bool:
    """Return whether a linear is its weight and bias: no other rank's part, no adapter."""
    lora = None if isinstance(linear, Int8Linear) else linear.lora
    return linear.mesh.tp.size == 1 and linear.bank is None and lora is None


def _tensors(layer: DecoderLayer) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the tensors of a layer in the order of the operator, with the names of `PRESENT`; None: it has none."""
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.up", "mlp.down")
    linears = dict(zip(names, _linears(layer), strict=True))
    for norm, following in ((layer.input_layernorm, names[:2]), (layer.post_attention_layernorm, names[2:])):
        yield "", norm.weight
        yield "input_layernorm.bias", norm.bias
        for name in following:
            linear = linears[name]
            yield "", linear.weight
            yield f"{name}.scale", linear.scale if isinstance(linear, Int8Linear) else None
            yield f"{name}.bias", linear.bias
