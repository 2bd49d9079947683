"""Phi-1, 1.5 and 2 (Li et al. 2023): attention and MLP read one norm, a part of each head is rotated."""

from megalite.families.family import ATTENTION_DROPOUT, SIZES, Family, sizes
from megalite.families.rope import Rope
from megalite.families.tensors import TensorNames

FAMILY = Family(
    "phi",
    "PhiForCausalLM",
    published="2023-06",
    # A tied head would have its bias without a weight of its own: "tie_word_embeddings" is refused below.
    keys={
        **{name: key for name, key in SIZES.items() if name not in ("head_dim", "tie_word_embeddings")},
        "rms_norm_eps": "layer_norm_eps",
    },
    words=(Rope(partial=True),),
    fixed={
        "norm": "layer_norm",
        "norm_placement": "parallel_shared",
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "gated_mlp": False,
        "hidden_act": "gelu_pytorch_tanh",
    },
    unset={"partial_rotary_factor": 0.5},
    required={
        "hidden_act": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "qk_layernorm": (False,),
        "tie_word_embeddings": (False,),
    },
    dropouts={
        **ATTENTION_DROPOUT,
        "resid_pdrop": ("residual_dropout",),
        "embd_pdrop": ("embedding_dropout",),
    },
    absent=sizes(
        *(2048, 8192, 24, 32, None, 2048), vocab_size=51200, layer_norm_eps=1e-5, partial_rotary_factor=0.5
    ),
    names=TensorNames(
        modules={
            "model.norm": "model.final_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        }
    ),
    presets={
        "phi-1": sizes(2048, 8192, 24, 32, 32, 2048, vocab_size=51200),
        "phi-1.5": sizes(2048, 8192, 24, 32, 32, 2048, vocab_size=51200),
        "phi-2": sizes(2560, 10240, 32, 32, 32, 2048, vocab_size=51200, partial_rotary_factor=0.4),
    },
)
