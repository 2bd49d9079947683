"""StarCoder 2 (Lozhkov et al. 2024): LayerNorm, biases, an MLP without gate, a window in every layer or in none."""

from megalite.families.family import ATTENTION_DROPOUT, SIZES, Family, sizes
from megalite.families.rope import Rope
from megalite.families.tensors import TensorNames
from megalite.families.windows import EveryLayer
from megalite.families.words import Shared

_BIASES = ("attention_bias", "attention_output_bias", "mlp_bias")
_PRESET = {"vocab_size": 49152, "sliding_window": 4096}

FAMILY = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    published="2024-02",
    keys={
        **{name: key for name, key in SIZES.items() if name != "head_dim"},
        "rms_norm_eps": "norm_epsilon",
    },
    words=(Rope(), EveryLayer(), Shared("use_bias", _BIASES)),
    fixed={"norm": "layer_norm", "gated_mlp": False, "hidden_act": "gelu_pytorch_tanh"},
    unset=dict.fromkeys(_BIASES, True),
    required={"hidden_act": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")},
    dropouts={
        **ATTENTION_DROPOUT,
        "residual_dropout": ("residual_dropout",),
        "embedding_dropout": ("embedding_dropout",),
    },
    absent=sizes(
        *(3072, 12288, 30, 24, 2, 4096),
        vocab_size=49152,
        norm_epsilon=1e-5,
        initializer_range=0.018042,
        tie_word_embeddings=True,
        use_bias=True,
    ),
    names=TensorNames(modules={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
    presets={
        "starcoder2-3b": sizes(
            *(3072, 12288, 30, 24, 2, 16384),
            **_PRESET,
            rope_theta=999999.4420358813,
            initializer_range=0.018042,
            tie_word_embeddings=True,
        ),
        "starcoder2-7b": sizes(
            *(4608, 18432, 32, 36, 4, 16384),
            **_PRESET,
            rope_theta=1000000.0,
            initializer_range=0.018042,
            tie_word_embeddings=True,
        ),
        "starcoder2-15b": sizes(
            *(6144, 24576, 40, 48, 4, 16384), **_PRESET, rope_theta=100000.0, initializer_range=0.01275
        ),
    },
)
