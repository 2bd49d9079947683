"""ModelShape: what a decoder-only Transformer is, in numbers and choices; torch-free."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for sequences longer than those of pre-training.

    linear: each frequency divided by `factor` (Chen et al. 2023, "Position interpolation"). dynamic: the base grows
    with a sequence longer than max_position_embeddings ("dynamic NTK"). llama3: low frequencies are divided, with a
    smooth passage between wavelengths original / high_freq_factor and original / low_freq_factor (Llama 3.1).
    yarn: a ramp between the pairs that turn beta_fast and beta_slow times within the original length, and scores
    multiplied by attention_factor squared (Peng et al. 2023). longrope: a divisor for each pair, short_factor up to
    the original length and long_factor beyond (Ding et al. 2024).
    attention_factor, mscale, mscale_all_dim: None: as the method's paper computes it from `factor`.
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


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only Transformer in Hugging Face's words; what the model, the planner and the files are made from.

    family: whose files it is written as; nothing is computed from it.
    position_embedding: rotary angles, or a learned table added to the embedding.
    partial_rotary_factor: the share of each head that is rotated. no_rope_every: every n-th layer has no rotary
    angles (Yang et al. 2025, "RoPE to NoPE and back again"); 0: all have them.
    embedding_scaled: the embedding is multiplied by sqrt(hidden_size), rounded to the weights' dtype.
    embedding_multiplier, residual_multiplier: factors of the embedding's output and of what each block adds to the
    residual stream. logits_scaling: a divisor of the logits (Granite).
    norm, rms_norm_eps: the kind of all norms. zero_centered_gamma: norms multiply by 1 + weight.
    norm_placement: "pre": before each block. "post": after each residual sum. "sandwich": before each block and on
    its output (Gemma 2). "output": on each block's output only (OLMo 2). "parallel": attention and MLP read the same
    residual stream, each through its own norm, and both are added to it (GPT-NeoX); "parallel_shared": through one
    norm (GPT-J, Phi).
    attention_bias: of query, key and value. attention_output_bias, mlp_bias, head_bias: of the other projections.
    gated_mlp: act(gate(x)) * up(x), else act(up(x)).
    qk_norm: RMSNorm of query and key, over each head ("head") or over all heads together ("full", OLMo 2).
    attention_multiplier: factor of the attention scores; query_pre_attn_scalar: the same, as the number whose root
    divides them. Without either: head_dim ** -0.5.
    attn_logit_softcapping, final_logit_softcapping: scores, and logits, become cap * tanh(value / cap).
    rope_local_base_freq: rope_theta in the layers with a window, unscaled; None: as in the others.
    sliding_window: how many keys a token sees, itself included, in the layers that `window_of` names.
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
    rope_local_base_freq: float | None = None
    partial_rotary_factor: float = 1.0
    no_rope_every: int = 0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    attention_multiplier: float | None = None
    head_bias: bool = False

    @property
    def rotary_dim(self) -> int:
        """How many values of each head are rotated; the others follow them unrotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def longest_sequence(self) -> int:
        """How many tokens a sequence may have: dynamic NTK goes on past max_position_embeddings."""
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type != "dynamic":
            return self.max_position_embeddings
        return int(self.max_position_embeddings * scaling.factor)

    @property
    def attention_scale(self) -> float | None:
        """Factor of the attention scores; None: head_dim ** -0.5."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        scalar = self.query_pre_attn_scalar
        return None if scalar is None else float(scalar**-0.5)

    def rotates(self, layer: int) -> bool:
        """Whether query and key of this layer are rotated."""
        if self.position_embedding != "rope":
            return False
        return not (self.no_rope_every and (layer + 1) % self.no_rope_every == 0)

    def window_of(self, layer: int) -> int | None:
        """How many keys a token of this layer sees; None: all up to it.

        The first full_attention_layers have no window, nor has every full_attention_every-th (0: none) of all.
        """
        every = self.full_attention_every
        full = layer < self.full_attention_layers or (every and (layer + 1) % every == 0)
        return None if full else self.sliding_window
