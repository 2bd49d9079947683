"""Latent attention: outputs and gradients are those of transformers' DeepSeek-V2 and DeepSeek-V3."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.model.context import StepContext
from megalite.model.dropout import NO_MASKS
from megalite.model.latent_attention import LatentSelfAttention
from megalite.model.options import PLAIN
from megalite.model.rope import LayerRotations
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.experts import LatentAttention, MixtureShape
from megalite.topology.shape import ModelShape, RopeScaling
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.tiny import tiny_shape

LATENT = LatentAttention(14, 6, 4, 5, q_lora_rank=18)
SIZES = {field.name: getattr(tiny_shape(), field.name) for field in fields(ModelShape)}
SHAPE = MixtureShape(**{**SIZES, "num_key_value_heads": 8, "head_dim": 10}, latent=LATENT)
YARN = RopeScaling("yarn", 4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.9)
SHAPES = {
    "plain": SHAPE,
    "YaRN": replace(SHAPE, rope_scaling=YARN),
    "one query projection": replace(SHAPE, latent=replace(LATENT, q_lora_rank=None)),
    "biases": replace(SHAPE, attention_bias=True, attention_output_bias=True),
    "values as wide as keys": replace(SHAPE, latent=replace(LATENT, v_head_dim=10)),
}
BATCH, LENGTH = 2, 40


def theirs(version: int, shape: MixtureShape) -> tuple[nn.Module, Any]:
    """Return transformers' attention of a layer, and its rotary embedding."""
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    assert shape.latent is not None
    scaling: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        names = ("rope_type", "factor", "original_max_position_embeddings", "mscale", "mscale_all_dim")
        scaling |= {name: getattr(shape.rope_scaling, name) for name in names}
    kind = DeepseekV2Config if version == 2 else DeepseekV3Config
    config = kind(
        **vars(shape.latent),
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_attention_heads,
        max_position_embeddings=shape.max_position_embeddings,
        attention_bias=shape.attention_bias,
        rope_parameters=scaling,
        attn_implementation="sdpa",
    )
    if version == 2:
        return v2.DeepseekV2Attention(config, 0), v2.DeepseekV2RotaryEmbedding(config)
    return v3.DeepseekV3Attention(config, 0), v3.DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("version", [2, 3])
def test_outputs_and_gradients_are_those_of_transformers(version: int, name: str) -> None:
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(5)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    reference, rotary = theirs(version, shape)
    own = LatentSelfAttention(shape, 0, ParallelMesh.single(), PLAIN, recompute=False)
    weights = dict(own.named_parameters())
    assert {part: tuple(each.shape) for part, each in weights.items()} == {
        part: tuple(each.shape) for part, each in reference.named_parameters()
    }
    with torch.no_grad():
        for part, weight in reference.named_parameters():
            weight.copy_(normal(*weight.shape) * (1 if weight.dim() == 1 else weight.shape[1] ** -0.5))
            weights[part].copy_(weight)
    hidden, grad = normal(BATCH, LENGTH, shape.hidden_size), normal(BATCH, LENGTH, shape.hidden_size)
    places = torch.arange(LENGTH).expand(BATCH, -1)
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    wanted, _ = reference(
        hidden_states=inputs[0], attention_mask=None, position_embeddings=rotary(inputs[0], places)
    )
    context = StepContext(rotation=LayerRotations(shape)(places))
    attended = own(inputs[1], context, NO_MASKS)
    wanted.backward(grad)
    attended.backward(grad)
    assert_close(attended, wanted, rtol=FLOAT32_RTOL, what="output")
    assert_close(inputs[1].grad, inputs[0].grad, rtol=FLOAT32_RTOL, what="hidden states")
    for part, weight in reference.named_parameters():
        assert_close(weights[part].grad, weight.grad, rtol=FLOAT32_RTOL, what=part)
