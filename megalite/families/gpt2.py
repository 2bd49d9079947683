"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases, matrices stored as [in, out]."""

from dataclasses import dataclass
from typing import Any

from megalite.families.family import Family, sizes
from megalite.families.tensors import QKV, Fused, TensorNames
from megalite.families.words import Config, Plain
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class _InnerSize(Plain):
    """n_inner, which is 4 * n_embd where it is null."""

    fields: tuple[str, ...] = ("intermediate_size",)
    config_keys: tuple[str, ...] = ("n_inner",)

    def read(self, config: Config) -> dict[str, Any]:
        inner, hidden = config.get("n_inner"), config.get("n_embd")
        if inner is None and isinstance(hidden, int):
            inner = 4 * hidden
        return {} if inner is None else {"intermediate_size": inner}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        return {"n_inner": shape.intermediate_size}


_GPT_2 = {"vocab_size": 50257, "tie_word_embeddings": True}

FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    published="2019-02",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
        "tie_word_embeddings": "tie_word_embeddings",
        "initializer_range": "initializer_range",
    },
    words=(_InnerSize(),),
    fixed={
        "position_embedding": "learned",
        "norm": "layer_norm",
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "gated_mlp": False,
        "hidden_act": "gelu_pytorch_tanh",
    },
    required={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    dropouts={
        "resid_pdrop": ("residual_dropout",),
        "embd_pdrop": ("embedding_dropout",),
        "attn_pdrop": ("attention_dropout",),
    },
    absent={
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
    },
    has_padding_row=False,
    names=TensorNames(
        modules={
            "model.embed_tokens": "transformer.wte",
            "model.embed_positions": "transformer.wpe",
            "model.layers": "transformer.h",
            "model.norm": "transformer.ln_f",
            "input_layernorm": "ln_1",
            "self_attn.o_proj": "attn.c_proj",
            "post_attention_layernorm": "ln_2",
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
        },
        fusions=(Fused("attn.c_attn", QKV),),
        conv1d=True,
        optional_prefix="transformer.",
    ),
    presets={
        "gpt2": sizes(768, 3072, 12, 12, 12, 1024, **_GPT_2),
        "gpt2-medium": sizes(1024, 4096, 24, 16, 16, 1024, **_GPT_2),
        "gpt2-large": sizes(1280, 5120, 36, 20, 20, 1024, **_GPT_2),
        "gpt2-xl": sizes(1600, 6400, 48, 25, 25, 1024, **_GPT_2),
    },
)
