"""Rotary angles equal those of transformers for every scaling, below and beyond the original length."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from megalite.model.rope import LayerRotations
from megalite.topology.shape import ModelShape, RopeScaling
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.tiny import tiny_shape

PAIRS = 4  # of tiny_shape's heads
ORIGINAL, LONGEST = 64, 256
FACTORS = {"short_factor": (1.0, 1.1, 1.3, 1.7), "long_factor": (1.0, 2.0, 4.0, 6.5)}
SCALINGS = {
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 4.0, 1.0, 4.0, ORIGINAL),
    "yarn": RopeScaling("yarn", 4.0, original_max_position_embeddings=ORIGINAL),
    "yarn of DeepSeek": RopeScaling(
        "yarn", 4.0, original_max_position_embeddings=ORIGINAL, mscale=1.2, mscale_all_dim=0.7
    ),
    "yarn, given": RopeScaling(
        "yarn",
        4.0,
        original_max_position_embeddings=ORIGINAL,
        beta_fast=8.0,
        beta_slow=2.0,
        truncate=False,
        attention_factor=1.25,
    ),
    "longrope": RopeScaling("longrope", 4.0, original_max_position_embeddings=ORIGINAL, **FACTORS),
    "longrope, given": RopeScaling(
        "longrope", 4.0, original_max_position_embeddings=ORIGINAL, attention_factor=1.1, **FACTORS
    ),
    "dynamic": RopeScaling("dynamic", 2.0),
}


def shape_with(scaling: RopeScaling) -> ModelShape:
    longest = ORIGINAL if scaling.rope_type == "dynamic" else LONGEST
    return replace(
        tiny_shape(), max_position_embeddings=longest, rope_scaling=scaling, rope_theta=10000.0, head_dim=8
    )


def given(shape: ModelShape) -> dict[str, Any]:
    """rope_parameters of a shape's scaling."""
    values = asdict(shape.rope_scaling) if shape.rope_scaling else {}
    said = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: value for name, value in said.items() if value is not None} | {
        "rope_theta": shape.rope_theta
    }


def theirs(shape: ModelShape, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [S, head_dim / 2] of transformers, whose angles are float32."""
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=given(shape),
    )
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    return cosines[0, :, :PAIRS], sines[0, :, :PAIRS]


@pytest.mark.parametrize("length", [ORIGINAL // 2, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_equal_those_of_transformers(name: str, length: int) -> None:
    shape = shape_with(SCALINGS[name])
    assert length <= shape.longest_sequence
    rotation = LayerRotations(shape)(torch.arange(length)[None]).full
    cosines, sines = theirs(shape, length)
    # transformers computes angles of up to 128 radians in float32.
    assert_close(rotation.cosines[0, :, 0], cosines, rtol=FLOAT32_RTOL, what="cosines")
    assert_close(rotation.sines[0, :, 0], sines, rtol=FLOAT32_RTOL, what="sines")


@pytest.mark.parametrize("length", [ORIGINAL // 2, ORIGINAL + 1, 2 * ORIGINAL])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_of_a_part_of_each_head_equal_those_of_transformers(name: str, length: int) -> None:
    """Phi rotates half of each head; all scalings count the rotated pairs alone."""
    shape = replace(shape_with(SCALINGS[name]), family="phi", head_dim=16, partial_rotary_factor=0.5)
    config = PhiConfig(
        hidden_size=4 * shape.head_dim,
        num_attention_heads=4,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={**given(shape), "partial_rotary_factor": 0.5},
    )
    cosines, sines = PhiRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    assert cosines.shape[-1] == 2 * PAIRS
    rotation = LayerRotations(shape)(torch.arange(length)[None]).full
    assert_close(rotation.cosines[0, :, 0], cosines[0, :, :PAIRS], rtol=FLOAT32_RTOL, what="cosines")
    assert_close(rotation.sines[0, :, 0], sines[0, :, :PAIRS], rtol=FLOAT32_RTOL, what="sines")


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_a_token_after_a_cache_has_the_angles_of_the_whole_sequence(name: str) -> None:
    rotations = LayerRotations(shape_with(SCALINGS[name]), torch.float64)
    whole = rotations(torch.arange(100)[None]).full
    alone = rotations(torch.tensor([[99]]), [(1, 100)]).full
    assert torch.equal(alone.cosines[0, 0], whole.cosines[0, 99])
    assert not torch.equal(alone.cosines, rotations(torch.tensor([[99 % ORIGINAL]])).full.cosines)
