"""The shape of a model and, from it, every parameter: name, shape, cut, stage, initial values."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt

from megalite.topology.layout import PipelineSplit, pipeline_split
from megalite.topology.sharding import Part, ShardSpec


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only Transformer in Hugging Face's words; what the model, the planner and the files are made from."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    family: str = "llama"


@dataclass(frozen=True)
class Parameter:
    """One registered parameter of the model.

    name: as registered, with the global layer index; equal to the canonical name unless it is fused.
    layer: global layer index; None outside the decoder layers.
    std: standard deviation of the initial normal values; None means all ones (norms).
    decay: whether weight decay applies (not to norms and biases).
    """

    name: str
    spec: ShardSpec
    layer: int | None
    std: float | None
    decay: bool

    @property
    def numel(self) -> int:
        return prod(self.spec.full_shape)


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_parameters(shape: ModelShape, layer: int) -> Iterator[Parameter]:
    """The parameters of decoder layer `layer`, in the order in which they are used."""
    prefix = f"model.layers.{layer}"
    hidden, std = shape.hidden_size, shape.initializer_range
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # Projections into the residual stream start smaller, by the number of them: Radford et al. 2019, section 2.3.
    residual_std = std / sqrt(2 * shape.num_hidden_layers)

    def weight(name: str, outputs: dict[str, int], inputs: int, dim: int, initial: float) -> Parameter:
        parts = tuple(Part(f"{prefix}.{part}.weight", (size, inputs)) for part, size in outputs.items())
        return Parameter(f"{prefix}.{name}.weight", ShardSpec(parts, dim), layer, initial, True)

    def norm(name: str) -> Parameter:
        spec = ShardSpec((Part(f"{prefix}.{name}.weight", (hidden,)),))
        return Parameter(f"{prefix}.{name}.weight", spec, layer, None, False)

    yield norm("input_layernorm")
    qkv = {"self_attn.q_proj": query, "self_attn.k_proj": key_value, "self_attn.v_proj": key_value}
    yield weight("self_attn.qkv_proj", qkv, hidden, 0, std)
    yield weight("self_attn.o_proj", {"self_attn.o_proj": hidden}, query, 1, residual_std)
    yield norm("post_attention_layernorm")
    gate_up = {"mlp.gate_proj": shape.intermediate_size, "mlp.up_proj": shape.intermediate_size}
    yield weight("mlp.gate_up_proj", gate_up, hidden, 0, std)
    yield weight("mlp.down_proj", {"mlp.down_proj": hidden}, shape.intermediate_size, 1, residual_std)


def stage_parameters(shape: ModelShape, split: PipelineSplit, stage: int) -> Iterator[Parameter]:
    """The parameters of one pipeline stage, in forward order.

    A tied weight stands on the stages of the first and the last chunk: once, where one stage holds both.
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
    for layer in split.layers_of(stage):
        yield from layer_parameters(shape, layer)
    if last in chunks:
        yield Parameter(FINAL_NORM, ShardSpec((Part(FINAL_NORM, (shape.hidden_size,)),)), None, None, False)
        if not tied:
            yield Parameter(HEAD, ShardSpec((Part(HEAD, table),), 0), None, std, True)
        elif 0 not in chunks:
            yield embedding


def model_parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """Every parameter of the model once, as one process registers them."""
    return tuple(stage_parameters(shape, pipeline_split(shape.num_hidden_layers), 0))


def canonical_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Canonical name -> full shape of every tensor of the model: what a checkpoint's weights must cover."""
    return {part.name: part.shape for parameter in model_parameters(shape) for part in parameter.spec.parts}


def parameter_count(shape: ModelShape) -> int:
    return sum(parameter.numel for parameter in model_parameters(shape))
