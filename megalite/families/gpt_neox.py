"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): parallel blocks, a part of each head rotated."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalite.families.family import ATTENTION_DROPOUT, SIZES, Family, sizes
from megalite.families.rope import Rope
from megalite.families.tensors import QKV, Fused, TensorNames
from megalite.families.words import ATTENTION_BIAS, Config, Plain
from megalite.topology.shape import ModelShape

# The approximation by tanh under its other names in transformers.
_TANH = ("gelu_new", "gelu_fast")


@dataclass(frozen=True)
class _ParallelResidual(Plain):
    """use_parallel_residual: attention and MLP read the same residual stream."""

    fields: tuple[str, ...] = ("norm_placement",)
    config_keys: tuple[str, ...] = ("use_parallel_residual",)

    def read(self, config: Config) -> dict[str, Any]:
        return {"norm_placement": "parallel" if config.get("use_parallel_residual", True) else "pre"}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        return {"use_parallel_residual": shape.norm_placement == "parallel"}

    def inexpressible(self, shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
        if shape.norm_placement not in ("parallel", "pre"):
            yield "norm_placement", shape.norm_placement, "parallel"


@dataclass(frozen=True)
class _Activation(Plain):
    """hidden_act, which is gelu in Pythia and gelu_fast in GPT-NeoX-20B."""

    fields: tuple[str, ...] = ("hidden_act",)
    config_keys: tuple[str, ...] = ("hidden_act",)

    def read(self, config: Config) -> dict[str, Any]:
        name = config.get("hidden_act", "gelu")
        return {"hidden_act": "gelu_pytorch_tanh" if name in _TANH else name}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        return {"hidden_act": shape.hidden_act}


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    published="2022-04",
    keys={
        **{name: key for name, key in SIZES.items() if name not in ("num_key_value_heads", "head_dim")},
        "rms_norm_eps": "layer_norm_eps",
    },
    words=(
        Rope(partial=True, theta_key="rotary_emb_base", partial_key="rotary_pct"),
        ATTENTION_BIAS,
        _ParallelResidual(),
        _Activation(),
    ),
    fixed={"norm": "layer_norm", "gated_mlp": False, "mlp_bias": True},
    unset={
        "norm_placement": "parallel",
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
        "attention_output_bias": True,
        "hidden_act": "gelu",
    },
    dropouts={**ATTENTION_DROPOUT, "hidden_dropout": ("residual_dropout", "embedding_dropout")},
    absent=sizes(
        *(6144, 24576, 44, 64, None, 2048),
        vocab_size=50432,
        layer_norm_eps=1e-5,
        rotary_pct=0.25,
        attention_bias=True,
    ),
    has_padding_row=False,
    names=TensorNames(
        modules={
            "model.embed_tokens": "gpt_neox.embed_in",
            "model.layers": "gpt_neox.layers",
            "model.norm": "gpt_neox.final_layer_norm",
            # In files, of every version of transformers; version 5 calls the module lm_head.
            "lm_head": "embed_out",
            "self_attn.o_proj": "attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        fusions=(Fused("attention.query_key_value", QKV, by_head=True),),
        in_models={"embed_out.weight": "lm_head.weight"},
    ),
    presets={
        "pythia-70m": sizes(512, 2048, 6, 8, 8, 2048, vocab_size=50304),
        "pythia-160m": sizes(768, 3072, 12, 12, 12, 2048, vocab_size=50304),
        "pythia-410m": sizes(1024, 4096, 24, 16, 16, 2048, vocab_size=50304),
        "pythia-1b": sizes(2048, 8192, 16, 8, 8, 2048, vocab_size=50304),
        "pythia-1.4b": sizes(2048, 8192, 24, 16, 16, 2048, vocab_size=50304),
        "pythia-2.8b": sizes(2560, 10240, 32, 32, 32, 2048, vocab_size=50304),
        "pythia-6.9b": sizes(4096, 16384, 32, 32, 32, 2048, vocab_size=50432),
        "pythia-12b": sizes(5120, 20480, 36, 40, 40, 2048, vocab_size=50688),
        "gpt-neox-20b": sizes(
            *(6144, 24576, 44, 64, 64, 2048), vocab_size=50432, hidden_act="gelu_pytorch_tanh"
        ),
    },
)
