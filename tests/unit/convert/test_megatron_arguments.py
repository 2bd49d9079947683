"""The args of a Megatron-LM checkpoint as a shape: what each says, and that whatever they hold ends in one error."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.convert.megatron.arguments import Arguments, megatron_shape, not_built, true_vocab_size
from megalite.errors import CheckpointError
from megalite.topology.shape import ModelShape, RopeScaling
from tests.support.megatron_writer import Written, arguments_of
from tests.support.tiny import FAMILY_SHAPES, tiny_shape

SOURCE = Path("model_optim_rng.pt")


def shape_with(shape: ModelShape, **changes: Any) -> ModelShape:
    table = vars(arguments_of(shape, Written(), **changes))
    return megatron_shape(Arguments(table, SOURCE), shape.vocab_size)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"use_rope_scaling": True}, "rope_scaling", RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            "rope_scaling",
            RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        ),
        ({"rotary_seq_len_interpolation_factor": 4}, "rope_scaling", RopeScaling("linear", 4.0)),
        ({"rotary_seq_len_interpolation_factor": 1}, "rope_scaling", None),
        ({"rotary_base": 500000}, "rope_theta", 500000.0),
        ({"window_size": (127, 0)}, "sliding_window", 128),
        ({"window_size": (-1, -1)}, "sliding_window", None),
        ({"group_query_attention": False, "num_query_groups": 1}, "num_key_value_heads", 8),
        ({"kv_channels": None}, "head_dim", 6),
        ({"ffn_hidden_size": None}, "intermediate_size", 192),
        ({"norm_epsilon": 1e-6}, "rms_norm_eps", 1e-6),
        ({"norm_epsilon": None, "layernorm_epsilon": 1e-6}, "rms_norm_eps", 1e-6),
        ({"disable_bias_linear": True, "add_bias_linear": True}, "mlp_bias", False),
        (
            {"position_embedding_type": None, "use_rotary_position_embeddings": True},
            "position_embedding",
            "rope",
        ),
        ({"position_embedding_type": None}, "position_embedding", "learned"),
        ({"add_qkv_bias": True}, "family", "qwen2"),
        ({"qk_layernorm": True}, "family", "qwen3"),
        ({"window_size": [9, 0]}, "family", "mistral"),
        ({"normalization": "LayerNorm"}, "norm", "layer_norm"),
        ({"init_method_std": 0.006}, "initializer_range", 0.006),
    ],
    ids=str,
)
def test_each_argument_means_its_field(changes: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(shape_with(tiny_shape(), **changes), field) == value


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"bias_gelu_fusion": True}, "gelu_pytorch_tanh"),
        ({"bias_gelu_fusion": False}, "gelu"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu_pytorch_tanh"),
        # The fused kernel is of a linear with a bias.
        ({"bias_gelu_fusion": True, "add_bias_linear": False, "add_qkv_bias": True}, "gelu"),
    ],
)
def test_gelu_is_that_of_the_kernel_that_ran(changes: dict[str, Any], activation: str) -> None:
    assert shape_with(FAMILY_SHAPES["gpt2"], **changes).hidden_act == activation


def test_a_table_that_was_not_padded_needs_no_size() -> None:
    table = {"make_vocab_size_divisible_by": 1, "tensor_model_parallel_size": 1}
    assert true_vocab_size(Arguments(table, SOURCE), 101, None) == 101


numbers = st.sampled_from([0, 1, 3, -1, 1 << 24, 1 << 70, 0.5, -2.0, float("nan"), float("inf"), True, False])
anything = st.none() | numbers | st.sampled_from(["", "rope", "alibi", (), (1, 0), [2], {"a": 1}, b"bytes"])
NAMES = [
    *vars(arguments_of(tiny_shape(), Written())),
    "use_rope_scaling",
    "rope_scaling_factor",
    "mtp_num_layers",
]


@given(st.dictionaries(st.sampled_from(NAMES), anything, max_size=4))
def test_whatever_they_hold_is_a_shape_or_one_error(changes: dict[str, Any]) -> None:
    arguments = Arguments(vars(arguments_of(tiny_shape(), Written(), **changes)), SOURCE)
    try:
        list(not_built(arguments))
        shape = megatron_shape(arguments, 101)
    except CheckpointError as error:
        assert str(SOURCE) in str(error)
    else:
        assert min(shape.num_hidden_layers, shape.head_dim, shape.intermediate_size, shape.hidden_size) > 0
        assert shape.num_attention_heads % shape.num_key_value_heads == 0
