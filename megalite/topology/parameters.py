"""From a ModelShape, every parameter of the model: name, shape, sharding, stage, initial values, weight decay."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod, sqrt

from megalite.topology.shape import ModelShape
from megalite.topology.sharding import Part, ShardSpec
from megalite.topology.stages import PipelineSplit, pipeline_split


@dataclass(frozen=True)
class Parameter:
    """One registered parameter of the model.

    name: as registered, with the global layer index; equal to the canonical name unless it is fused.
    layer: global layer index; None outside the decoder layers.
    std: standard deviation of the initial normal values; None: all values are `fill` (norms 1, biases 0; 0 also for
    norms with zero_centered_gamma).
    decay: whether weight decay applies (not to norms and biases).
    """

    name: str
    spec: ShardSpec
    layer: int | None
    std: float | None
    decay: bool
    fill: float = 1.0

    @property
    def numel(self) -> int:
        return prod(self.spec.full_shape)


EMBEDDING = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"

_LAYER_NORMS = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("input_layernorm", "post_attention_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "output": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "parallel": ("input_layernorm", "post_attention_layernorm"),
    "parallel_shared": ("input_layernorm",),
}


def layer_norms(shape: ModelShape) -> tuple[str, ...]:
    """Return the names of a decoder layer's norms on the residual stream, in order of use."""
    return _LAYER_NORMS[shape.norm_placement]


def layer_parameters(shape: ModelShape, layer: int) -> Iterator[Parameter]:
    """Yield the parameters of decoder layer `layer`, in order of use."""
    prefix = f"model.layers.{layer}"
    hidden, std = shape.hidden_size, shape.initializer_range
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # Initial projections into the residual stream shrink with their number: Radford et al. 2019, section 2.3.
    residual_std = std / sqrt(2 * shape.num_hidden_layers)

    def column(
        name: str, outputs: dict[str, int], bias: bool, heads: Sequence[int | None] = (None, None)
    ) -> Iterator[Parameter]:
        """Yield a column-parallel projection; `outputs`: fused projection -> its size; `heads`: heads of each."""
        parts = [
            (f"{prefix}.{part}", size, heads[place]) for place, (part, size) in enumerate(outputs.items())
        ]
        weights = tuple(Part(f"{part}.weight", (size, hidden), heads) for part, size, heads in parts)
        yield Parameter(f"{prefix}.{name}.weight", ShardSpec(weights, 0), layer, std, True)
        if bias:
            biases = tuple(Part(f"{part}.bias", (size,), heads) for part, size, heads in parts)
            yield Parameter(f"{prefix}.{name}.bias", ShardSpec(biases, 0), layer, None, False, fill=0.0)

    def row(name: str, inputs: int, bias: bool) -> Iterator[Parameter]:
        """Yield a row-parallel projection; its bias is added after the reduction and is replicated over tp."""
        weight = f"{prefix}.{name}.weight"
        yield Parameter(weight, ShardSpec((Part(weight, (hidden, inputs)),), 1), layer, residual_std, True)
        if bias:
            yield _vector(f"{prefix}.{name}.bias", hidden, layer, fill=0.0)

    def norm(name: str) -> Iterator[Parameter]:
        yield from _norm(shape, f"{prefix}.{name}", layer)

    def head_norm(name: str, heads: int) -> Iterator[Parameter]:
        """Yield the RMSNorm of query or key: one replicated weight for every head, or one sharded over all heads."""
        weight, ones = f"{prefix}.self_attn.{name}.weight", _ones(shape)
        if shape.qk_norm == "head":
            yield _vector(weight, shape.head_dim, layer, fill=ones, summed=True)
        elif shape.qk_norm == "full":
            spec = ShardSpec((Part(weight, (heads * shape.head_dim,), heads),), 0)
            yield Parameter(weight, spec, layer, None, False, ones)

    before_mlp = [
        each for each in layer_norms(shape) if each not in ("input_layernorm", "post_feedforward_layernorm")
    ]
    if "input_layernorm" in layer_norms(shape):
        yield from norm("input_layernorm")
    qkv = {"self_attn.q_proj": query, "self_attn.k_proj": key_value, "self_attn.v_proj": key_value}
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    yield from column("self_attn.qkv_proj", qkv, shape.attention_bias, heads)
    yield from head_norm("q_norm", shape.num_attention_heads)
    yield from head_norm("k_norm", shape.num_key_value_heads)
    yield from row("self_attn.o_proj", query, shape.attention_output_bias)
    for each in before_mlp:
        yield from norm(each)
    if shape.gated_mlp:
        gate_up = {"mlp.gate_proj": shape.intermediate_size, "mlp.up_proj": shape.intermediate_size}
        yield from column("mlp.gate_up_proj", gate_up, shape.mlp_bias)
    else:
        yield from column("mlp.up_proj", {"mlp.up_proj": shape.intermediate_size}, shape.mlp_bias)
    yield from row("mlp.down_proj", shape.intermediate_size, shape.mlp_bias)
    if "post_feedforward_layernorm" in layer_norms(shape):
        yield from norm("post_feedforward_layernorm")


def stage_parameters(shape: ModelShape, split: PipelineSplit, stage: int) -> Iterator[Parameter]:
    """Yield the parameters of one pipeline stage, in forward order.

    A tied weight is on the stages of the first and of the last chunk; only once if one stage holds both.
    """
    chunks, last = split.chunks_of(stage), len(split.layers) - 1
    std = shape.initializer_range
    tied = shape.tie_word_embeddings
    ends = (split.stage_of(0), split.stage_of(last))
    embedding_stages = ends if tied and ends[0] != ends[1] else ends[:1]
    table = (shape.vocab_size, shape.hidden_size)
    embedding = Parameter(
        EMBEDDING, ShardSpec((Part(EMBEDDING, table),), 0, stages=embedding_stages), None, std, True
    )
    if 0 in chunks:
        yield embedding
        if shape.position_embedding == "learned":
            positions = Part(POSITIONS, (shape.max_position_embeddings, shape.hidden_size))
            yield Parameter(POSITIONS, ShardSpec((positions,)), None, std, True)
    for layer in split.layers_of(stage):
        yield from layer_parameters(shape, layer)
    if last in chunks:
        yield from _norm(shape, FINAL_NORM.removesuffix(".weight"), None)
        if not tied:
            yield Parameter(HEAD, ShardSpec((Part(HEAD, table),), 0), None, std, True)
            if shape.head_bias:
                bias = ShardSpec((Part(HEAD_BIAS, (shape.vocab_size,)),), 0)
                yield Parameter(HEAD_BIAS, bias, None, None, False, fill=0.0)
        elif 0 not in chunks:
            yield embedding


def _norm(shape: ModelShape, name: str, layer: int | None) -> Iterator[Parameter]:
    yield _vector(f"{name}.weight", shape.hidden_size, layer, fill=_ones(shape))
    if shape.norm == "layer_norm":
        yield _vector(f"{name}.bias", shape.hidden_size, layer, fill=0.0)


def _ones(shape: ModelShape) -> float:
    """Return the weight with which a norm multiplies by 1."""
    return 0.0 if shape.zero_centered_gamma else 1.0


def _vector(name: str, size: int, layer: int | None, *, fill: float, summed: bool = False) -> Parameter:
    """Return a norm's weight or a bias, replicated over the tensor-parallel ranks."""
    return Parameter(name, ShardSpec((Part(name, (size,)),), summed=summed), layer, None, False, fill)


def model_parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """Return every parameter of the model once, as a single process registers them."""
    return tuple(stage_parameters(shape, pipeline_split(shape.num_hidden_layers), 0))


def canonical_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> full shape of every tensor of the model; a checkpoint must cover all of them."""
    return {part.name: part.shape for parameter in model_parameters(shape) for part in parameter.spec.parts}


def parameter_count(shape: ModelShape) -> int:
    return sum(parameter.numel for parameter in model_parameters(shape))
