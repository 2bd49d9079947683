"""Mixtures of experts and multi-head latent attention as records: which layers have them, and their tensors. No torch.

Sources: Shazeer et al. 2017, "Outrageously large neural networks";
Fedus et al. 2021, "Switch Transformers"; DeepSeek-AI 2024, "DeepSeek-V2" (shared experts, latent attention).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from megalite.topology.shape import ModelShape

ROUTER = "mlp.gate"
CORRECTION_BIAS = f"{ROUTER}.e_score_correction_bias"
EXPERT_AXIS = "etp"
"""`ShardSpec.axis` of experts' tensors: each expert is cut over the ranks of expert tensor parallelism, not over tp."""


@dataclass(frozen=True)
class ExpertShape:
    """The MLPs of a mixture.

    num_experts, num_experts_per_tok: of a layer, and those that a token is sent to.
    moe_intermediate_size: of one expert. shared_intermediate_size: of the MLP for all tokens, which may be several
    shared experts; 0: none. shared_gate: its output is scaled by a linear of one output (Qwen2-MoE).
    router_bias, expert_bias: trained biases (gpt-oss). swiglu_limit: gate and up are clamped, see
    ops.activations.clamped_swiglu; None: an expert is down(silu(gate(x)) * up(x)).
    router_scores: of the router's logits, over all experts. norm_topk_prob: the weights of a token's experts are
    divided by their sum, and all are multiplied by routed_scaling_factor.
    n_group, topk_group: a token's experts come from the topk_group groups of n_group with the best scores: their
    largest with softmax (DeepSeek-V2), the sum of their two largest with sigmoid (DeepSeek-V3).
    correction_bias: a bias, trained by counts of tokens alone, is added to the scores for the choice (DeepSeek-V3).
    first_k_dense_replace, mlp_only_layers, decoder_sparse_step: the layers that keep their dense MLP are the first k,
    those named, and all but every n-th.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    swiglu_limit: float | None = None
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    correction_bias: bool = False
    first_k_dense_replace: int = 0
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1

    def in_layer(self, layer: int) -> bool:
        """Return whether a layer has experts, not a dense MLP."""
        kept = layer < self.first_k_dense_replace or layer in self.mlp_only_layers
        return not kept and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True)
class LatentAttention:
    """Keys and values of all heads from one vector of kv_lora_rank values, and qk_rope_head_dim rotated values of the
    key that all heads share. q_lora_rank: the same for the query; None: one projection."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_values(self) -> int:
        """Values of the vector that generation keeps of a token: the latent one, and the rotated part of all keys."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class MixtureShape(ModelShape):
    """A decoder with experts or latent attention, or both; the other fields as in ModelShape, of its dense layers too.

    With latent attention head_dim is latent.qk_head_dim, every head has its own key and value, and the last
    qk_rope_head_dim values of query and key are rotated, as interleaved pairs.
    """

    experts: ExpertShape | None = None
    latent: LatentAttention | None = None

    @property
    def rotary_dim(self) -> int:
        """The number of values of each head that are rotated."""
        return super().rotary_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def attention_scale(self) -> float | None:
        """Factor of the attention scores; None: head_dim ** -0.5. With YaRN's mscale_all_dim more, as DeepSeek's."""
        scale, scaling = super().attention_scale, self.rope_scaling
        if self.latent is None or scale is not None or scaling is None or not scaling.mscale_all_dim:
            return scale
        factor: float = self.head_dim**-0.5 * scaling.yarn_scale(scaling.mscale_all_dim) ** 2
        return factor

    @property
    def score_values(self) -> int:
        """Values of a token's queries and attention outputs: a product with a key and with a value for each."""
        if self.latent is None:
            return super().score_values
        return self.num_attention_heads * (self.latent.qk_head_dim + self.latent.v_head_dim)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.in_layer(layer)

    def dense_layer(self, layer: int) -> ModelShape:
        fields_of_all = {field.name: getattr(self, field.name) for field in fields(ModelShape)}
        if self.experts is not None and self.has_experts(layer):
            fields_of_all["intermediate_size"] = self.experts.shared_intermediate_size
        return ModelShape(**fields_of_all)

    def first_alike(self, layer: int) -> int:
        """Return the first layer with the same tensors."""
        kind = self.has_experts(layer)
        return next(other for other in range(layer + 1) if self.has_experts(other) == kind)


@dataclass(frozen=True)
class BlockTensor:
    """A tensor of a block, of canonical tensors of one shape stacked along dim 0.

    parts: their modules and "weight" or "bias"; by default the tensor itself. dim: the dim of each that is cut over the
    ranks of `axis`; None: whole on each of them. summed: as in ShardSpec. output: it leads into the residual stream.
    by_counts: changed by the counts of a step alone, not by a gradient.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    axis: str = "tp"
    parts: tuple[str, ...] = ()
    output: bool = False
    summed: bool = False
    by_counts: bool = False


def expert_tensors(shape: MixtureShape, numbers: range | None = None) -> Iterator[BlockTensor]:
    """Yield the tensors of a layer's router, experts and shared experts.

    numbers: the experts, all by default. Theirs are stacked: of each its gate and then its up projection.
    """
    experts, hidden = shape.experts, shape.hidden_size
    if experts is None:
        return
    number, width, shared = (
        experts.num_experts,
        experts.moe_intermediate_size,
        experts.shared_intermediate_size,
    )
    yield BlockTensor(f"{ROUTER}.weight", (number, hidden))
    if experts.router_bias:
        yield BlockTensor(f"{ROUTER}.bias", (number,))
    if experts.correction_bias:
        yield BlockTensor(CORRECTION_BIAS, (number,), by_counts=True)

    def of_experts(kind: str, *modules: str) -> tuple[str, ...]:
        return tuple(
            f"mlp.experts.{expert}.{module}.{kind}"
            for expert in (range(number) if numbers is None else numbers)
            for module in modules
        )

    up, down = ("gate_proj", "up_proj"), "down_proj"
    stacked = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    yield BlockTensor(f"{stacked[0]}.weight", (width, hidden), 0, EXPERT_AXIS, of_experts("weight", *up))
    weights = of_experts("weight", down)
    yield BlockTensor(f"{stacked[1]}.weight", (hidden, width), 1, EXPERT_AXIS, weights, output=True)
    if experts.expert_bias:
        yield BlockTensor(f"{stacked[0]}.bias", (width,), 0, EXPERT_AXIS, of_experts("bias", *up))
        # The first of the ranks that share an expert adds it, and the others have no gradient of it.
        biases = of_experts("bias", down)
        yield BlockTensor(f"{stacked[1]}.bias", (hidden,), None, EXPERT_AXIS, biases, summed=True)
    if shared:
        module = "mlp.shared_experts"
        both = tuple(f"{module}.{name}.weight" for name in up)
        yield BlockTensor(f"{module}.gate_up_proj.weight", (shared, hidden), 0, parts=both)
        yield BlockTensor(f"{module}.{down}.weight", (hidden, shared), 1, output=True)
    if experts.shared_gate:
        yield BlockTensor("mlp.shared_expert_gate.weight", (1, hidden))


def latent_tensors(shape: MixtureShape) -> Iterator[BlockTensor]:
    """Yield the tensors of a layer's latent attention; only those over heads are cut."""
    latent, heads, hidden = shape.latent, shape.num_attention_heads, shape.hidden_size
    if latent is None:
        return
    queries, low = heads * latent.qk_head_dim, latent.kv_lora_rank
    rank = latent.q_lora_rank
    if shape.attention_sinks:
        yield BlockTensor("self_attn.sinks", (heads,), 0)
    if rank is None:
        yield BlockTensor("self_attn.q_proj.weight", (queries, hidden), 0)
    else:
        yield from _down("q_a_proj", "q_a_layernorm", rank, rank, shape)
        yield BlockTensor("self_attn.q_b_proj.weight", (queries, rank), 0)
    yield from _down("kv_a_proj_with_mqa", "kv_a_layernorm", low + latent.qk_rope_head_dim, low, shape)
    both = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    yield BlockTensor("self_attn.kv_b_proj.weight", (both, low), 0)
    yield BlockTensor("self_attn.o_proj.weight", (hidden, heads * latent.v_head_dim), 1, output=True)
    if shape.attention_output_bias:
        yield BlockTensor("self_attn.o_proj.bias", (hidden,))


def _down(name: str, norm: str, outputs: int, normed: int, shape: MixtureShape) -> Iterator[BlockTensor]:
    """Yield a projection to the latent vector and its norm."""
    yield BlockTensor(f"self_attn.{name}.weight", (outputs, shape.hidden_size))
    if shape.attention_bias:
        yield BlockTensor(f"self_attn.{name}.bias", (outputs,))
    yield BlockTensor(f"self_attn.{norm}.weight", (normed,))
