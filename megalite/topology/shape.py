"""ModelShape: what a decoder-only Transformer is, in numbers and choices; torch-free."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for sequences longer than those of pre-training.

    linear: every frequency over `factor` (Chen et al. 2023). llama3: only the low ones, with a smooth passage
    between wavelengths original / high_freq_factor and original / low_freq_factor (Llama 3.1).
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only Transformer in Hugging Face's words; what the model, the planner and the files are made from.

    family: whose files it is written as; nothing is computed from it. What is computed:
    position_embedding: rotary angles, or a learned table added to the embedding.
    embedding_scaled: by the root of hidden_size, rounded to the weights' type.
    norm, norm_placement: which, and before each block's input, after its residual sum, or before its input and after
    its output ("sandwich"); rms_norm_eps is of all. norm_offset: norms multiply by 1 + weight.
    attention_bias: of query, key and value. attention_output_bias, mlp_bias: of the other projections.
    gated_mlp: act(gate(x)) * up(x), else act(up(x)). qk_norm: RMSNorm over each head of query and key.
    query_pre_attn_scalar: what the scores are divided by the root of; None: head_dim.
    attn_logit_softcapping, final_logit_softcapping: scores, and logits, become cap * tanh(value / cap).
    rope_local_base_freq: rope_theta in the layers with a window, unscaled; None: as in the others.
    sliding_window: a token sees so many keys, itself included, in the layers that `window_of` says.
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
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh"] = "silu"
    qk_norm: bool = False
    sliding_window: int | None = None
    full_attention_layers: int = 0
    full_attention_every: int = 0
    embedding_scaled: bool = False
    norm_offset: bool = False
    query_pre_attn_scalar: int | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope_local_base_freq: float | None = None

    def window_of(self, layer: int) -> int | None:
        """How many keys a token of this layer sees; None: all up to it.

        The first full_attention_layers have no window, nor has every full_attention_every-th (0: none) of all.
        """
        every = self.full_attention_every
        full = layer < self.full_attention_layers or (every and (layer + 1) % every == 0)
        return None if full else self.sliding_window
