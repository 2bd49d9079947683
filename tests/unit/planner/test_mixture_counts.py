"""Parameters of mixtures, latent attention and dense families: to the last one those of transformers' own classes."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megalite.config.sources.huggingface import shape_of_folder
from megalite.errors import ConfigError
from megalite.families.registry import FAMILIES, hf_config
from megalite.planner.mixture_config import MIXTURES, mixture_shape, read_mixture
from megalite.planner.parameter_count import ParameterCount
from tests.support.mixture_configs import CONFIGS, Config, shape_of
from tests.support.published_operations import token_operations
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES

# Billions in all and active, as model cards and reports give them. gpt-oss leaves the embedding out of the active ones,
# and so does Qwen3's card; DeepSeek-V2-Lite's 2.4 is neither with nor without one table.
PUBLISHED = {
    "Mixtral 8x7B": (46.7, 12.9),
    "Mixtral 8x22B": (141, 39),
    "Qwen3 30B-A3B": (30.5, None),
    "Qwen3 235B-A22B": (235, 22),
    "Qwen1.5-MoE A2.7B": (14.3, 2.7),
    "Qwen2 57B-A14B": (57.4, 14.2),
    "OLMoE 1B-7B": (6.9, 1.3),
    "DeepSeek-V2-Lite": (15.7, None),
    "DeepSeek-V2": (236, 21),
    "DeepSeek-V3": (671, None),
    "gpt-oss 20b": (20.91, None),
    "gpt-oss 120b": (116.83, None),
    "Phi-3.5-MoE": (41.9, 6.6),
}
WITHOUT_EMBEDDING = {"gpt-oss 20b": 3.61, "gpt-oss 120b": 5.13, "Qwen3 30B-A3B": 3.0, "DeepSeek-V3": 37}


def transformers_count(config: Config) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    stored = model.state_dict().keys()
    biases = (buffer.numel() for name, buffer in model.named_buffers() if name in stored)  # of routers
    return int(sum(parameter.numel() for parameter in model.parameters()) + sum(biases))


def rounded_like(value: float, published: float) -> float:
    return round(value, len(str(published).partition(".")[2]))


def small(config: Config, seed: int) -> Config:
    """Return a config.json of the same family with small random sizes, and its choices drawn too."""
    draw = random.Random(seed)
    layers, shared = draw.randint(3, 6), draw.choice([1, 2, 3])
    sizes = {
        "hidden_size": 12 * draw.randint(2, 9),
        "intermediate_size": draw.randint(5, 70),
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 6 if "kv_lora_rank" in config else shared,
        "vocab_size": draw.randint(50, 90),
        "moe_intermediate_size": draw.randint(3, 40),
        "shared_expert_intermediate_size": draw.randint(3, 40),
        "num_experts": (number := 4 * draw.randint(2, 5)),
        "num_local_experts": number,
        "n_routed_experts": number,
        "num_experts_per_tok": draw.randint(1, 4),
        "head_dim": 2 * draw.randint(2, 9),
        "kv_lora_rank": draw.randint(5, 30),
        "q_lora_rank": draw.choice([None, 11]),
        "qk_nope_head_dim": 2 * draw.randint(2, 9),
        "qk_rope_head_dim": 2 * draw.randint(2, 9),
        "v_head_dim": draw.randint(3, 19),
        "first_k_dense_replace": draw.randint(0, layers),
        "n_shared_experts": draw.randint(1, 3),
        "decoder_sparse_step": draw.randint(1, 3),
        "mlp_only_layers": draw.sample(range(layers), 1),
        "attention_bias": draw.random() < 0.5,
        "lm_head_bias": (untied := draw.random() < 0.5),
    }
    changed = {key: value for key, value in sizes.items() if key in config}
    # Layers, and with them the order of the windows.
    named = {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    return {**config, **changed, **named, "tie_word_embeddings": not untied}


@pytest.mark.parametrize("name", cases(CONFIGS, core=["Mixtral 8x7B", "DeepSeek-V3", "gpt-oss 20b"]))
def test_published_mixtures_have_the_parameters_of_transformers(name: str) -> None:
    assert ParameterCount.of(shape_of(CONFIGS[name])).total == transformers_count(CONFIGS[name])


@pytest.mark.parametrize("name", cases(CONFIGS, core=["Qwen1.5-MoE A2.7B", "DeepSeek-V2", "Phi-3.5-MoE"]))
def test_mixtures_of_any_size_have_the_parameters_of_transformers(name: str) -> None:
    for seed in range(4):
        config = small(CONFIGS[name], seed)
        assert ParameterCount.of(shape_of(config)).total == transformers_count(config), config


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_those_of_the_publishers(name: str) -> None:
    total, active = PUBLISHED[name]
    shape = shape_of(CONFIGS[name])
    count = ParameterCount.of(shape)
    assert rounded_like(count.total / 1e9, total) == total
    if active is not None:
        assert rounded_like(count.active / 1e9, active) == active
    if name in WITHOUT_EMBEDDING:
        without = (count.active - shape.vocab_size * shape.hidden_size) / 1e9
        assert rounded_like(without, WITHOUT_EMBEDDING[name]) == WITHOUT_EMBEDDING[name]


def test_every_family_is_published_here() -> None:
    families = {shape.family for shape in MIXTURE_SHAPES.values()}
    trained = {family for family in families if FAMILIES[family].presets}
    assert {config["model_type"] for config in CONFIGS.values()} == MIXTURES.keys() | trained
    assert not MIXTURES.keys() & FAMILIES.keys()


@pytest.mark.parametrize("name", cases(FAMILY_SHAPES, core=["gemma2", "phi"]))
def test_dense_families_of_any_size_have_the_parameters_of_transformers(name: str, tmp_path: Path) -> None:
    draw = random.Random(name)
    for _ in range(3):
        changes: dict[str, Any] = {
            "intermediate_size": draw.randint(5, 90),
            "num_hidden_layers": draw.randint(1, 5),
            "vocab_size": draw.randint(50, 90),
        }
        config = hf_config(replace(FAMILY_SHAPES[name], **changes), "float32", {})
        (tmp_path / "config.json").write_text(json.dumps(config))
        ours = ParameterCount.of(shape_of_folder(str(tmp_path))).total
        assert ours == transformers_count(config), config


def test_a_file_that_is_no_mixture_is_left_to_its_own_reader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_mixture(tmp_path) is None
    (tmp_path / "config.json").write_text("no JSON")
    assert read_mixture(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": None}, "has no num_experts_per_tok, which phimoe needs"),
        ({"num_local_experts": None}, "has no num_local_experts or num_experts"),
        ({"tie_word_embeddings": True}, "phimoe has lm_head_bias = True; only an untied head"),
    ],
)
def test_a_file_that_cannot_be_planned_is_refused(tmp_path: Path, change: Config, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Phi-3.5-MoE"] | change))
    with pytest.raises(ConfigError, match=message):
        read_mixture(tmp_path)


def test_windows_of_another_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="only the family's own order of windows"):
        mixture_shape(CONFIGS["Qwen1.5-MoE A2.7B"] | {"layer_types": ["sliding_attention"] * 24})


def test_a_token_computes_with_the_experts_that_it_is_sent_to() -> None:
    """One token more a layer: three matrices of an expert, times two operations, times forward and backward."""
    config = CONFIGS["Mixtral 8x7B"]
    two, three = (shape_of(config | {"num_experts_per_tok": number}) for number in (2, 3))
    more = token_operations(three, 4096).model - token_operations(two, 4096).model
    assert more == 32 * 3 * 4096 * 14336 * 6
