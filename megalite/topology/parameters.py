"""From a ModelShape, every parameter of the model: name, shape, sharding, stage, initial values, weight decay."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt

from megalite.topology.adapter import Lora, Prefix, names_module
from megalite.topology.experts import ROUTER, BlockTensor, MixtureShape, expert_tensors, latent_tensors
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
    trained: whether the optimizer changes it; with an adapter most parameters stay as they are.
    adapter: whether it belongs to the adapter, not to the model itself.
    by_counts: whether the router's counts of a step change it, not a gradient; it is in checkpoints like a trained one.
    """

    name: str
    spec: ShardSpec
    layer: int | None
    std: float | None
    decay: bool
    fill: float = 1.0
    trained: bool = True
    adapter: bool = False
    by_counts: bool = False

    @property
    def numel(self) -> int:
        return prod(self.spec.full_shape)

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it consists of matrices of a decoder layer: neither embedding nor head, norm or bias."""
        return self.layer is not None and len(self.spec.parts[0].shape) == 2

    @property
    def takes_lora(self) -> bool:
        """Whether a low-rank adapter may change it: a matrix of a layer, but no router."""
        # A mixture's layer without shared experts is planned as a dense one with an empty MLP.
        return self.is_hidden_matrix and self.numel > 0 and not self.name.endswith(f".{ROUTER}.weight")


EMBEDDING = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
PREFIX = "model.prefix"

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


def module_of(parameter: Parameter) -> str:
    """Return the name of the parameter's module in a run's records; that of a tied head is the embedding."""
    if parameter.layer is not None:
        return f"layers.{parameter.layer}"
    if parameter.name in (EMBEDDING, POSITIONS):
        return "embedding"
    if parameter.name in (HEAD, HEAD_BIAS):
        return "head"
    return "prefix" if parameter.adapter else "final_norm"


def layer_norms(shape: ModelShape) -> tuple[str, ...]:
    """Return the names of a decoder layer's norms on the residual stream, in order of use."""
    return _LAYER_NORMS[shape.norm_placement]


def layer_parameters(shape: ModelShape, layer: int, experts: range | None = None) -> Iterator[Parameter]:
    """Yield the parameters of decoder layer `layer`, in order of use, with those of its adapters.

    experts: those of them that a rank holds; None: all.
    """
    if isinstance(shape.adapter, Prefix):
        yield from _layer_prefix(shape, shape.adapter, layer)
    for parameter in _own_layer_parameters(shape, layer, experts):
        yield _as_trained(shape, parameter)
        if isinstance(shape.adapter, Lora) and parameter.takes_lora:
            yield from _lora_parameters(shape.adapter, parameter)


def _as_trained(shape: ModelShape, parameter: Parameter) -> Parameter:
    """Return the parameter of the model itself, trained or not."""
    adapter = shape.adapter
    kept = adapter is not None and not adapter.trains(part.name for part in parameter.spec.parts)
    return replace(parameter, trained=False, by_counts=False) if kept else parameter


def _lora_parameters(adapter: Lora, adapted: Parameter) -> Iterator[Parameter]:
    """Yield A and B of the adapted parts of a weight, and DoRA's magnitudes of its rows.

    A column-parallel weight has A whole on every rank and B cut like its rows; a row-parallel one has A cut like its
    columns and B whole. A whole one gets the gradient of each rank's share of the product, and these are summed. A
    weight that no rank shares (a projection to latent attention's vectors) has both whole. The adapters of experts are
    cut over the ranks that share an expert, and have the experts' copies.
    """
    spec = adapted.spec
    parts = [(part.name.removesuffix(".weight"), part) for part in spec.parts]
    parts = [(module, part) for module, part in parts if adapter.adapts(module)]
    if not parts:
        return
    cut_a, cut_b = (None, 0) if spec.dim == 0 else (spec.dim, None)
    rank, fan_in = adapter.rank, spec.full_shape[1]
    prefix = adapted.name.removesuffix(".weight")
    a = tuple(Part(f"{module}.lora_A.weight", (rank, fan_in)) for module, _ in parts)
    b = tuple(Part(f"{module}.lora_B.weight", (part.shape[0], rank), part.heads) for module, part in parts)
    spec_a = ShardSpec(a, cut_a, spec.axis, summed=spec.dim == 0)
    yield Parameter(f"{prefix}.lora.A", spec_a, adapted.layer, _linear_std(fan_in), True, adapter=True)
    spec_b = ShardSpec(b, cut_b, spec.axis, summed=spec.dim == 1)
    yield Parameter(f"{prefix}.lora.B", spec_b, adapted.layer, None, True, fill=0.0, adapter=True)
    if adapter.dora:
        magnitudes = tuple(
            Part(f"{module}.lora_magnitude_vector.weight", part.shape[:1], part.heads)
            for module, part in parts
        )
        name = f"{prefix}.lora.magnitude"
        yield Parameter(name, ShardSpec(magnitudes, cut_b), adapted.layer, None, False, adapter=True)


def _layer_prefix(shape: ModelShape, prefix: Prefix, layer: int) -> Iterator[Parameter]:
    """Yield a layer's prefix, its keys over its values, with a column a virtual token, initially normal as in PEFT.

    With a projection: the rows of the MLP's second linear that compute them.
    """
    columns = prefix.tokens if prefix.projection is None else prefix.projection
    std = 1.0 if prefix.projection is None else _linear_std(prefix.projection)
    heads = shape.num_key_value_heads
    rows, name = heads * shape.head_dim, f"model.layers.{layer}.self_attn.prefix"

    def fused(kind: str, *size: int) -> ShardSpec:
        return ShardSpec(tuple(Part(f"{name}_{each}.{kind}", size, heads) for each in ("key", "value")), 0)

    yield Parameter(f"{name}.weight", fused("weight", rows, columns), layer, std, True, adapter=True)
    if prefix.projection is not None:
        yield Parameter(f"{name}.bias", fused("bias", rows), layer, std, False, adapter=True)


def _prefix_trunk(shape: ModelShape, prefix: Prefix, stages: int) -> Iterator[Parameter]:
    """Yield the layers' common part of a projected prefix: the virtual tokens' embedding and the MLP's first linear.

    Every stage has a copy. Each tensor-parallel rank applies it to its own heads, so its gradient is the sum over them.
    """
    if prefix.projection is None:
        return
    width = shape.num_key_value_heads * shape.head_dim
    std = _linear_std(width)
    for name, size, spread, decays in (
        ("embedding", (prefix.tokens, width), 1.0, True),
        ("hidden.weight", (prefix.projection, width), std, True),
        ("hidden.bias", (prefix.projection,), std, False),
    ):
        part = Part(f"{PREFIX}.{name}", size)
        spec = ShardSpec((part,), stages=tuple(range(stages)), summed=True)
        yield Parameter(part.name, spec, None, spread, decays, adapter=True)


def _linear_std(fan_in: int) -> float:
    """Return the standard deviation of PyTorch's default initial values of a linear."""
    return 1 / sqrt(3 * fan_in)


def alike(shape: ModelShape, layer: int) -> int:
    """Return the first layer whose parameters have the same sizes as this one's; with an adapter the layer itself."""
    if shape.adapter is not None:
        return layer
    return shape.first_alike(layer) if isinstance(shape, MixtureShape) else 0


def _own_layer_parameters(shape: ModelShape, layer: int, experts: range | None) -> Iterator[Parameter]:
    if not isinstance(shape, MixtureShape):
        yield from _dense_layer_parameters(shape, layer)
        return
    blocks: dict[str, Iterator[BlockTensor]] = {}
    if shape.latent is not None:
        blocks["self_attn"] = latent_tensors(shape)
    if shape.has_experts(layer):
        blocks["mlp"] = expert_tensors(shape, experts)
    for parameter in _dense_layer_parameters(shape, layer):
        block = parameter.name.split(".")[3]
        if block in blocks:  # in place of the dense block's first parameter, once
            yield from (_block_parameter(tensor, shape, layer) for tensor in blocks[block])
        else:
            yield parameter


def _block_parameter(tensor: BlockTensor, shape: ModelShape, layer: int) -> Parameter:
    prefix, matrix = f"model.layers.{layer}.", len(tensor.shape) == 2
    parts = tuple(Part(prefix + name, tensor.shape) for name in tensor.parts or (tensor.name,))
    spec, fill = (
        ShardSpec(parts, tensor.dim, tensor.axis, summed=tensor.summed),
        1.0 if "norm" in tensor.name else 0.0,
    )
    std = _residual_std(shape) if tensor.output else shape.initializer_range
    return Parameter(
        *(prefix + tensor.name, spec, layer, std if matrix else None, matrix, fill),
        trained=not tensor.by_counts,
        by_counts=tensor.by_counts,
    )


def _residual_std(shape: ModelShape) -> float:
    # Initial projections into the residual stream shrink with their number: Radford et al. 2019, section 2.3.
    return shape.initializer_range / sqrt(2 * shape.num_hidden_layers)


def _dense_layer_parameters(shape: ModelShape, layer: int) -> Iterator[Parameter]:
    prefix = f"model.layers.{layer}"
    hidden, std = shape.hidden_size, shape.initializer_range
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    residual_std = _residual_std(shape)

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
        norm_name
        for norm_name in layer_norms(shape)
        if norm_name not in ("input_layernorm", "post_feedforward_layernorm")
    ]
    if "input_layernorm" in layer_norms(shape):
        yield from norm("input_layernorm")
    if shape.attention_sinks:
        sinks = Part(f"{prefix}.self_attn.sinks", (shape.num_attention_heads,), shape.num_attention_heads)
        yield Parameter(sinks.name, ShardSpec((sinks,), 0), layer, None, False, fill=0.0)
    qkv = {"self_attn.q_proj": query, "self_attn.k_proj": key_value, "self_attn.v_proj": key_value}
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    yield from column("self_attn.qkv_proj", qkv, shape.attention_bias, heads)
    yield from head_norm("q_norm", shape.num_attention_heads)
    yield from head_norm("k_norm", shape.num_key_value_heads)
    yield from row("self_attn.o_proj", query, shape.attention_output_bias)
    for norm_name in before_mlp:
        yield from norm(norm_name)
    if shape.gated_mlp:
        gate_up = {"mlp.gate_proj": shape.intermediate_size, "mlp.up_proj": shape.intermediate_size}
        yield from column("mlp.gate_up_proj", gate_up, shape.mlp_bias)
    else:
        yield from column("mlp.up_proj", {"mlp.up_proj": shape.intermediate_size}, shape.mlp_bias)
    yield from row("mlp.down_proj", shape.intermediate_size, shape.mlp_bias)
    if "post_feedforward_layernorm" in layer_norms(shape):
        yield from norm("post_feedforward_layernorm")


def stage_parameters(
    shape: ModelShape, split: PipelineSplit, stage: int, experts: range | None = None
) -> Iterator[Parameter]:
    """Yield the parameters of one pipeline stage, in forward order.

    A tied weight is on the stages of the first and of the last chunk; only once if one stage holds both.
    The common part of a prefix is on all stages. experts: those of each layer that a rank holds; None: all.
    """
    # First on every stage, so that all stages sum tied weights in one order.
    if isinstance(shape.adapter, Prefix):
        yield from _prefix_trunk(shape, shape.adapter, split.stages)
    for parameter in _own_stage_parameters(shape, split, stage, experts):
        yield parameter if parameter.layer is not None else _as_trained(shape, parameter)


def _own_stage_parameters(
    shape: ModelShape, split: PipelineSplit, stage: int, experts: range | None
) -> Iterator[Parameter]:
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
        yield from layer_parameters(shape, layer, experts)
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
    """Return canonical name -> full shape of every tensor of the model."""
    return {part.name: part.shape for parameter in model_parameters(shape) for part in parameter.spec.parts}


def trained_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> full shape of every tensor that training changes: a checkpoint's."""
    trained = [each for each in model_parameters(shape) if each.trained or each.by_counts]
    return {part.name: part.shape for parameter in trained for part in parameter.spec.parts}


def names_tied_table(pattern: str, shape: ModelShape) -> bool:
    """Return whether a pattern of `Lora.modules_to_save` names the embedding or the head of a model that ties the two.

    PEFT trains a copy of each module that it names, so that the two would be tied no longer.
    """
    tables = (name.removesuffix(".weight") for name in (EMBEDDING, HEAD))
    return shape.tie_word_embeddings and any(names_module([pattern], table) for table in tables)


def parameter_count(shape: ModelShape) -> int:
    return sum(parameter.numel for parameter in model_parameters(shape))
