"""Shapes of a run: presets, a Hugging Face config.json, and what is filled in."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.config.sources.presets import PRESETS
from megalite.families.registry import FAMILIES
from megalite.topology.parameters import parameter_count
from tests.unit.config.runs import REMOVED, load, problems


def test_what_is_left_out_of_a_shape_follows_hugging_face(tmp_path: Path) -> None:
    config = load(tmp_path, {"model.num_key_value_heads": REMOVED}).config
    assert (config.model.num_key_value_heads, config.model.head_dim) == (8, 6)
    assert config.model.shape(101).vocab_size == 101
    assert load(tmp_path, {"model.vocab_size": 512}).config.model.shape(101).vocab_size == 512


PARAMETERS = {
    # As published with the weights.
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "phi-1": 1_418_270_720,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "granite-3.0-2b": 2_533_525_504,
    "granite-3.0-8b": 8_170_835_968,
    "smollm3-3b": 3_075_098_624,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "granite-3.0-1b-a400m": 1_334_628_352,
    "granite-3.0-3b-a800m": 3_298_793_472,
    "granite-3.1-1b-a400m": 1_334_628_352,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "moonlight-16b-a3b": 15_960_110_208,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # With a vocabulary of 16384.
    "tiny": 2_835_584,
    "small": 16_913_280,
    "medium": 97_536_768,
    "large": 299_942_912,
    "xlarge": 704_718_336,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_parameters_that_are_known_of_it(preset: str, tmp_path: Path) -> None:
    everything = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers"), REMOVED)
    everything |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), REMOVED)
    changes = {f"model.{key}": value for key, value in everything.items()} | {"model.preset": preset}
    loaded = load(tmp_path, changes)
    assert parameter_count(loaded.config.model.shape(16384)) == PARAMETERS[preset]
    assert loaded.origin("model.hidden_size") == f"preset {preset}"


def test_keys_beside_a_preset_count_but_a_flag_counts_more(tmp_path: Path) -> None:
    beside = load(tmp_path, {"model.preset": "small"}).config.model
    assert (beside.hidden_size, beside.tie_word_embeddings) == (48, True)
    by_flag = load(tmp_path, flags=["--model.preset", "small", "--model.num_hidden_layers", "2"]).config.model
    assert (by_flag.hidden_size, by_flag.num_hidden_layers) == (384, 2)
    said = problems(tmp_path, {"model.preset": "small", "model.hf_config": "config.json"})
    assert "model.preset: is set together with model.hf_config; set only one of them" in map(str, said)


# Shapes of guides of this field: hidden, layers, heads, MLP, positions, and the preset of this shape or None.
GUIDES = {
    "a base configuration": (2048, 24, 16, 5632, 2048, None),
    "small": (256, 4, 4, 1024, 512, None),
    "medium": (768, 12, 12, 3072, 1024, "gpt2"),
    "large": (1024, 24, 16, 4096, 2048, "gpt2-medium"),
}


@pytest.mark.parametrize("guide", GUIDES)
def test_the_sizes_of_a_guide_are_a_shape(guide: str, tmp_path: Path) -> None:
    hidden, layers, heads, intermediate, positions, preset = GUIDES[guide]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": intermediate, "max_position_embeddings": positions}
    without = {"model.num_key_value_heads": REMOVED}
    by_keys = load(tmp_path, without | {f"model.{key}": value for key, value in sizes.items()}).config.model
    assert {key: getattr(by_keys, key) for key in sizes} == sizes
    # Queries, keys, values and output; gate, up and down; two norms: for each layer. Embedding, head, a last norm.
    layer = 4 * hidden**2 + 3 * hidden * intermediate + 2 * hidden
    assert parameter_count(by_keys.shape(32000)) == layers * layer + 2 * 32000 * hidden + hidden
    if preset is not None:
        flags = ["--model.max_position_embeddings", str(positions)]
        by_name = load(tmp_path, WITHOUT_SHAPE | {"model.preset": preset}, flags=flags).config.model
        assert {key: getattr(by_name, key) for key in sizes} == sizes


HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": None,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
WITHOUT_SHAPE = {f"model.{key}": REMOVED for key in SHAPE_KEYS}


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
    ],
)
def test_a_hugging_face_config_is_a_shape(tmp_path: Path, rope: dict[str, Any], theta: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | rope))
    loaded = load(tmp_path, WITHOUT_SHAPE | {"model.hf_config": ".", "model.num_hidden_layers": 2})
    model = loaded.config.model
    assert (model.hidden_size, model.num_hidden_layers, model.head_dim, model.vocab_size) == (64, 2, 8, 512)
    assert model.rope_theta == theta
    assert loaded.origin("model.hidden_size") == "config.json"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "bloom"},
            f'config.json is of model_type "bloom"; {", ".join(FAMILIES)} are supported',
        ),
        ({"hidden_act": "gelu"}, 'config.json has hidden_act = "gelu"; only "silu" is supported'),
        (
            {"rope_scaling": {"type": "proportional", "factor": 2}},
            'rotary frequencies ("proportional"); "default", "linear",',
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rotates a part of each head",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}},
            'scales its rotary frequencies ("longrope") without long_factor; add long_factor',
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2}},
            'rotary frequencies ("linear"); "default", "longrope" are supported',
        ),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention", *["full_attention"] * 3]},
            "mixes layer_types",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention", *["full_attention"] * 4]},
            "config.json mixes layer_types; sliding_attention may only follow after full_attention, with every",
        ),
        (
            {"model_type": "gemma3"},
            'model_type "gemma3"; it reads images too, which is not supported: use a folder',
        ),
        (
            {"model_type": "phi", "hidden_act": "gelu_new", "qk_layernorm": True},
            "config.json has qk_layernorm = true; only false is supported",
        ),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention = true",
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            'scales the rotary frequencies of layers with a window ("linear"); only "default" is supported',
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 1, 0]},
            "config.json mixes no_rope_layers; only every n-th layer may be without rotary embedding",
        ),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 8},
            "config.json mixes layer_types; sliding_attention may only follow after full_attention",
        ),
        ({"hidden_size": "64"}, 'model.hidden_size: "64" (config.json) should be a whole number'),
    ],
)
def test_a_shape_that_is_not_built_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | changes))
    [found] = problems(tmp_path, WITHOUT_SHAPE | {"model.hf_config": "config.json"})
    assert said in str(found)


PHI_3 = {
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}


def test_a_published_configuration_is_the_preset_of_its_name(tmp_path: Path) -> None:
    """That of Phi-3-mini-4k-instruct; it names code of its own, which nobody runs."""
    (tmp_path / "config.json").write_text(json.dumps(PHI_3))
    read = load(tmp_path, WITHOUT_SHAPE | {"model.hf_config": "config.json"})
    preset = load(tmp_path, WITHOUT_SHAPE | {"model.preset": "phi-3-mini-4k"})
    assert read.config.model == preset.config.model


def test_the_shape_of_real_weights(tmp_path: Path, shared_data: Path) -> None:
    config = load(tmp_path, WITHOUT_SHAPE | {"model.hf_config": str(shared_data / "stories260K")}).config
    assert parameter_count(config.model.shape(0)) == 260_032
