"""Keys of a config.json that a run takes over, leaves out with a note, or refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megalite.config.load import LoadedRun, load_run
from megalite.errors import ConfigError
from megalite.families.inert import INERT
from megalite.families.registry import FAMILIES, hf_config
from megalite.topology.parameters import model_parameters
from megalite.train.step.options import optimizer_settings
from tests.support.tiny import FAMILY_SHAPES

SETTINGS = {
    "training.steps": "1",
    "training.sequence_length": "8",
    "training.global_batch_size": "1",
    "training.micro_batch_size": "1",
    "data.source": "text.txt",
    "tokenizer.vocab_size": "101",
}


def loaded(folder: Path, config: dict[str, Any], *flags: str, named: str = "hf_config") -> LoadedRun:
    (folder / "config.json").write_text(json.dumps(config))
    settings = {**SETTINGS, f"model.{named}": str(folder)}
    return load_run(
        None, [*(text for name, value in settings.items() for text in (f"--{name}", value)), *flags]
    )


@pytest.mark.parametrize("named", ["hf_config", "weights"])
def test_dropout_is_the_file_s_as_transformers_trains_with_it(tmp_path: Path, named: str) -> None:
    run = loaded(tmp_path, {"model_type": "gpt2", "attn_pdrop": 0.2}, named=named)
    model = run.config.model
    assert (model.residual_dropout, model.embedding_dropout, model.attention_dropout) == (0.1, 0.1, 0.2)
    [note] = [note for note in run.notes if "dropout" in note]
    assert note == (
        "model.residual_dropout = 0.1 and model.embedding_dropout = 0.1 and model.attention_dropout = 0.2 as in"
        f" {tmp_path / 'config.json'}; for training without dropout set 0"
    )
    flags = [f"--model.{name}_dropout=0" for name in ("residual", "embedding", "attention")]
    without = loaded(tmp_path, {"model_type": "gpt2"}, *flags, named=named)
    assert without.config.model.residual_dropout == 0 and not any("dropout" in each for each in without.notes)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_default_dropout_is_that_of_transformers(tmp_path: Path, model_type: str) -> None:
    family = FAMILIES[model_type]
    theirs = AutoConfig.for_model(model_type)
    expected = {
        setting: getattr(theirs, key)
        for key, settings in family.dropouts.items()
        for setting in settings
        if getattr(theirs, key)
    }
    assert family.read_dropout({}) == expected


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_key_of_the_configuration_class_is_read_refused_or_known_to_have_no_effect(
    model_type: str,
) -> None:
    family = FAMILIES[model_type]
    keys = AutoConfig.for_model(model_type).to_dict().keys()
    assert (
        not keys - family.config_keys - family.dropouts.keys() - INERT - NOT_COMPUTED.get(model_type, set())
    )


# transformers has the key, and its model does not read it.
NOT_COMPUTED = {"phi3": {"embd_pdrop"}}


def test_keys_without_effect_are_named_and_others_are_not(tmp_path: Path) -> None:
    config = hf_config(FAMILY_SHAPES["qwen2"], "float32", {})
    assert not loaded(tmp_path, config).notes
    extra = {"attention_multiplier": 0.5, "logit_scale": 2.0, "x_null": None, "id2label": {"0": "a"}}
    [note] = loaded(tmp_path, config | extra).notes
    assert note == (
        f"{tmp_path / 'config.json'} has keys that transformers' qwen2 does not use, nor this run:"
        " attention_multiplier, logit_scale"
    )
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnModel"}}
    [note] = loaded(tmp_path, config | code).notes
    assert (
        "names code of its own (modeling_own.OwnModel), which is not run: the model is transformers' qwen2"
        in note
    )


@pytest.mark.parametrize("ends", [3, [7, 3]])
def test_an_end_of_text_that_transformers_does_not_train_as_padding_is_noted(
    tmp_path: Path, ends: Any
) -> None:
    config = hf_config(FAMILY_SHAPES["qwen2"], "float32", {})
    [note] = loaded(tmp_path, config | {"eos_token_id": ends, "pad_token_id": 3}).notes
    assert "has pad_token_id = 3, an end of text too: transformers gives that row of the embedding no" in note
    assert not loaded(tmp_path, config | {"eos_token_id": ends, "pad_token_id": 4}).notes
    gpt2 = hf_config(FAMILY_SHAPES["gpt2"], "float32", {})
    assert not loaded(tmp_path, gpt2 | {"eos_token_id": ends, "pad_token_id": 3}).notes


@pytest.mark.parametrize("family", ["starcoder2", "phi", "gpt_neox"])
def test_a_head_size_that_the_family_does_not_have_is_refused(tmp_path: Path, family: str) -> None:
    config = hf_config(FAMILY_SHAPES[family], "float32", {})
    own = FAMILY_SHAPES[family].head_dim
    assert not loaded(tmp_path, config | {"head_dim": own}).notes
    with pytest.raises(
        ConfigError, match=rf"has head_dim = {own + 2}; only {own}, the hidden size divided by"
    ):
        loaded(tmp_path, config | {"head_dim": own + 2})


@pytest.mark.parametrize(
    ("family", "pattern", "count"),
    [
        ("gpt2", "transformer.h.*.attn.c_attn.*", 2),
        ("gpt2", "h.*.mlp.c_proj.*", 2),
        ("gpt2", "model.layers.*.mlp.down_proj.*", 2),
        ("phi3", "*.qkv_proj.weight", 1),
        ("gpt_neox", "gpt_neox.layers.*.attention.query_key_value.*", 2),
        ("llama 3", "model.layers.*.mlp.*", 2),
    ],
)
def test_groups_of_the_optimizer_take_the_family_s_own_names(
    tmp_path: Path, family: str, pattern: str, count: int
) -> None:
    """count: the parameters of each layer that the pattern chooses."""
    shape = FAMILY_SHAPES[family]
    flag = f'--optimizer.groups=[{{pattern = "{pattern}", learning_rate_ratio = 0.5}}]'
    run = loaded(tmp_path, hf_config(shape, "float32", {}), flag)
    [group] = optimizer_settings(run.config).groups
    chosen = [parameter.name for parameter in model_parameters(shape) if group.matches(parameter)]
    assert len(chosen) == count * shape.num_hidden_layers
    with pytest.raises(ConfigError, match=r"matches no parameter; match whole parameters by the names of"):
        loaded(tmp_path, hf_config(shape, "float32", {}), flag.replace(pattern, "none.*"))


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config = hf_config(FAMILY_SHAPES["qwen2"], "float32", {}) | {
        "quantization_config": {"quant_method": "awq"}
    }
    with pytest.raises(ConfigError, match="quantization_config; use the weights from before"):
        loaded(tmp_path, config)
