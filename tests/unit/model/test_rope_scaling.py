"""Rotary angles equal those of transformers for every scaling, below and beyond the original length."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from megalite.config.sources.huggingface import shape_of_folder
from megalite.errors import ConfigError
from megalite.families.registry import hf_config
from megalite.model.rope import LayerRotations
from megalite.topology.shape import ModelShape, RopeScaling
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
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


def config_of(shape: ModelShape) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=given(shape),
    )


def theirs(shape: ModelShape, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [S, head_dim / 2] of transformers, whose angles are float32."""
    cosines, sines = LlamaRotaryEmbedding(config_of(shape))(torch.zeros(1), torch.arange(length)[None])
    return cosines[0, :, :PAIRS], sines[0, :, :PAIRS]


@exhibit(
    "torchtitan PR#4215",
    subject="folders",
    there="YaRN's lower bound was not kept at zero or above, and frequencies were wrong",
    here="frequencies are those of transformers, also for few pairs and short lengths",
    fault=faults.YARN_IS_NOT_CLAMPED,
    case="yarn-32",
)
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
    alone = rotations(torch.tensor([[99]]), torch.tensor([[100]])).full
    assert torch.equal(alone.cosines[0, 0], whole.cosines[0, 99])
    assert not torch.equal(alone.cosines, rotations(torch.tensor([[99 % ORIGINAL]])).full.cosines)


_LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "rope_theta": 300}
_YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}
_LONG = {"rope_type": "longrope", "short_factor": [1, 1.1, 1.5], "long_factor": [1.0, 2, 6.0]}
# Other forms than ours: older names, whole numbers, factors of 1 and below, keys left out or null.
WRITTEN: dict[str, dict[str, Any]] = {
    "type": {"type": "linear", "factor": 4},
    "factor 1": {"rope_type": "linear", "factor": 1},
    "factor below 1": {"rope_type": "linear", "factor": 0.5},
    "dynamic 1": {"rope_type": "dynamic", "factor": 1.0},
    "dynamic below 1": {"rope_type": "dynamic", "factor": 0.5},
    "llama3": {**_LLAMA3, "original_max_position_embeddings": 16},
    "llama3, factor 1": {**_LLAMA3, "factor": 1.0, "original_max_position_embeddings": 16},
    "llama3, length as a float": {**_LLAMA3, "original_max_position_embeddings": 16.0},
    "llama3 without the length": _LLAMA3,
    "yarn, factor null": {**_YARN, "factor": None},
    "yarn, factor below 1": {**_YARN, "factor": 0.5},
    "yarn without the length": {"rope_type": "yarn", "factor": 2.0},
    "yarn, nulls": {**_YARN, "attention_factor": None, "beta_fast": None, "beta_slow": None},
    "yarn, mscale 0": {**_YARN, "mscale": 0.0, "mscale_all_dim": 0.0},
    "yarn, whole numbers": {**_YARN, "attention_factor": 1, "beta_fast": 32, "beta_slow": 1},
    "yarn, equal limits": {**_YARN, "beta_fast": 2, "beta_slow": 2},
    "longrope": {**_LONG, "original_max_position_embeddings": 16},
    "longrope, factor 1": {**_LONG, "original_max_position_embeddings": 16, "factor": 1},
    "longrope without the length": _LONG,
    "nothing": {},
    "type default": {"type": "default"},
}


def written(folder: Path, **changes: Any) -> Path:
    """Write config.json of a tiny Llama with other keys of the rotary embedding; None leaves one out."""
    config = {**hf_config(tiny_shape(), "float32", {}), "rope_parameters": None, **changes}
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_angles_of_the_folder(folder: Path) -> None:
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    ours = LayerRotations(shape_of_folder(str(folder)))
    for length in (12, 40):
        cosines, sines = theirs(torch.zeros(1), torch.arange(length)[None])
        rotation = ours(torch.arange(length)[None]).full
        assert_close(rotation.cosines[0, :, 0], cosines[0, :, :3], rtol=FLOAT32_RTOL, what="cosines")
        assert_close(rotation.sines[0, :, 0], sines[0, :, :3], rtol=FLOAT32_RTOL, what="sines")


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_that_transformers_takes_gives_its_angles(name: str, key: str, tmp_path: Path) -> None:
    assert_angles_of_the_folder(written(tmp_path, **{key: WRITTEN[name]}))


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"}),
        ({"rope_type": "default", "rope_theta": 77.0}, {"type": "linear", "factor": 4.0}),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}, {}),
    ],
)
def test_rope_scaling_counts_before_rope_parameters_as_in_transformers(
    parameters: dict[str, Any], scaling: dict[str, Any], tmp_path: Path
) -> None:
    assert_angles_of_the_folder(written(tmp_path, rope_parameters=parameters, rope_scaling=scaling))


@pytest.mark.parametrize(
    ("rope", "missing"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "dynamic", "factor": None}, "factor"),
        ({**_LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 3}, "long_factor"),
    ],
)
def test_a_scaling_without_a_number_that_it_needs_is_refused(
    rope: dict[str, Any], missing: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        shape_of_folder(str(written(tmp_path, rope_scaling=rope)))
    assert f"without {missing}; add {missing}" in str(refused.value)


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_each_sequence_has_the_angles_of_its_own_length_while_transformers_takes_the_longest(
    name: str,
) -> None:
    shape = shape_with(SCALINGS[name])
    short, long = ORIGINAL // 2, 2 * ORIGINAL
    positions = torch.cat((torch.arange(short), torch.arange(long)))[None]
    lengths = torch.tensor([short] * short + [long] * long)[None]
    packed = LayerRotations(shape)(positions, lengths).full
    alone = [LayerRotations(shape)(torch.arange(length)[None]).full for length in (short, long)]
    for ours, *expected in zip(packed.angles(), *(rotation.angles() for rotation in alone), strict=True):
        assert_close(ours, torch.cat(expected, dim=1), rtol=FLOAT32_RTOL)
    config = config_of(shape)
    theirs = [
        LlamaRotaryEmbedding(config)(torch.zeros(1), each)[0][0] for each in (positions, positions[:, short:])
    ]
    assert torch.equal(theirs[0][:short], theirs[1][:short]), "the angles of the longest sequence"


def test_longrope_without_longer_sequences_has_one_table() -> None:
    """A Phi-3 whose max_position_embeddings is lowered to the original length."""
    shape = replace(shape_with(SCALINGS["longrope"]), max_position_embeddings=ORIGINAL)
    positions = torch.arange(ORIGINAL)[None]
    packed = LayerRotations(shape)(positions, torch.full_like(positions, ORIGINAL)).full
    alone = LayerRotations(shape)(positions).full
    assert torch.equal(packed.cosines, alone.cosines) and torch.equal(packed.sines, alone.sines)
