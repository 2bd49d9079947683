"""ModelShape: the sizes and architecture choices of a decoder-only Transformer. No torch."""

from dataclasses import dataclass, replace
from math import log
from typing import Literal, Self

from megalite.topology.adapter import Adapter, Prefix


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for sequences longer than in pre-training.

    linear: each frequency is divided by `factor` (Chen et al. 2023, "Position interpolation"). dynamic: the base grows
    with the length of a sequence longer than max_position_embeddings ("dynamic NTK"). llama3: low frequencies are
    divided by `factor`, with a smooth transition between the wavelengths original / high_freq_factor and
    original / low_freq_factor (Llama 3.1). yarn: a ramp between the pairs that rotate beta_fast and beta_slow times
    within the original length; scores are multiplied by attention_factor squared (Peng et al. 2023). longrope: a
    divisor for each pair, short_factor up to the original length and long_factor beyond (Ding et al. 2024).
    attention_factor, mscale, mscale_all_dim: None: computed from `factor` as in the method's paper.
    """

    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def yarn_scale(self, mscale: float = 1.0) -> float:
        """Return the root of the factor of YaRN's scores (Peng et al. 2023, section 3.4)."""
        return 0.1 * mscale * log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only Transformer in Hugging Face's terms, from which model, planner and files are built.

    family: the model family whose file format is written; no computation depends on it.
    position_embedding: rotary angles, or a learned table added to the embedding.
    partial_rotary_factor: the share of each head that is rotated. no_rope_every: every n-th layer has no rotary
    angles (Yang et al. 2025, "RoPE to NoPE and back again"); 0: all layers have them.
    embedding_scaled: the embedding is multiplied by sqrt(hidden_size), rounded to the weights' dtype.
    embedding_multiplier, residual_multiplier: factors of the embedding's output and of each block's output before the
    residual add. logits_scaling: a divisor of the logits (Granite).
    norm, rms_norm_eps: the type and epsilon of all norms. zero_centered_gamma: norms multiply by 1 + weight.
    norm_placement: "pre": before each block. "post": after each residual sum. "sandwich": before each block and on
    its output (Gemma 2). "output": on each block's output only (OLMo 2). "parallel": attention and MLP read the same
    residual stream, each through its own norm, and both are added to the stream (GPT-NeoX); "parallel_shared": both
    through one norm (GPT-J, Phi).
    attention_bias: whether query, key and value have biases; attention_output_bias, mlp_bias, head_bias: the same for
    the other projections.
    gated_mlp: act(gate(x)) * up(x), else act(up(x)).
    qk_norm: RMSNorm of query and key, over each head ("head") or over all heads together ("full", OLMo 2).
    attention_multiplier: factor of the attention scores. query_pre_attn_scalar: alternatively, the factor is
    query_pre_attn_scalar ** -0.5. With neither: head_dim ** -0.5.
    attn_logit_softcapping, final_logit_softcapping: scores, and logits, become cap * tanh(value / cap).
    attention_sinks: one trained logit a head that takes its share of each softmax (gpt-oss).
    rope_local_base_freq: rope_theta, unscaled, of the layers with a window; None: rope_theta as in the other layers.
    sliding_window: the number of keys that a token sees, its own included, in the layers with a window (`window_of`).
    adapter: given, only its weights are trained; those of the model stay as they are.
    """

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
    position_embedding: Literal["rope", "learned"] = "rope"
    rope_scaling: RopeScaling | None = None
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_placement: Literal["pre", "post", "sandwich", "output", "parallel", "parallel_shared"] = "pre"
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh"] = "silu"
    qk_norm: Literal["head", "full"] | None = None
    sliding_window: int | None = None
    full_attention_layers: int = 0
    full_attention_every: int = 0
    embedding_scaled: bool = False
    zero_centered_gamma: bool = False
    query_pre_attn_scalar: int | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_sinks: bool = False
    rope_local_base_freq: float | None = None
    partial_rotary_factor: float = 1.0
    no_rope_every: int = 0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    attention_multiplier: float | None = None
    head_bias: bool = False
    adapter: Adapter | None = None

    @property
    def base(self) -> Self:
        """The model without its adapter."""
        return replace(self, adapter=None)

    @property
    def rotary_dim(self) -> int:
        """The number of leading values of each head that are rotated; the remaining values are not."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def longest_sequence(self) -> int:
        """The largest number of tokens in a sequence; with dynamic NTK beyond max_position_embeddings.

        Virtual tokens of a prefix take some of the positions.
        """
        scaling, positions = self.rope_scaling, self.max_position_embeddings
        if scaling is not None and scaling.rope_type == "dynamic":
            positions = int(positions * max(scaling.factor, 1.0))
        return positions - self.prefix_tokens

    @property
    def prefix_tokens(self) -> int:
        """The number of virtual tokens in front of each sequence; 0 without a prefix."""
        return self.adapter.tokens if isinstance(self.adapter, Prefix) else 0

    @property
    def score_values(self) -> int:
        """Values of a token's queries and attention outputs: a product with a key and with a value for each."""
        return 2 * self.num_attention_heads * self.head_dim

    @property
    def attention_scale(self) -> float | None:
        """Factor of the attention scores; None: head_dim ** -0.5."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        scalar = self.query_pre_attn_scalar
        return None if scalar is None else float(scalar**-0.5)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return False

    def dense_layer(self, layer: int) -> "ModelShape":
        """Return a layer as one with ordinary attention and, in place of experts, the MLP that all tokens share."""
        return self

    def rotates(self, layer: int) -> bool:
        """Return whether query and key of this layer are rotated."""
        if self.position_embedding != "rope":
            return False
        return not (self.no_rope_every and (layer + 1) % self.no_rope_every == 0)

    def window_of(self, layer: int) -> int | None:
        """Return the number of keys that a token of this layer sees; None: all keys up to the token.

        The first full_attention_layers layers have no window, nor has every full_attention_every-th layer (0: none).
        """
        every = self.full_attention_every
        full = layer < self.full_attention_layers or (every and (layer + 1) % every == 0)
        return None if full else self.sliding_window
