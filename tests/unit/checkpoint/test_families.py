"""The table of each family: every tensor once, under transformers' names, and a configuration that reads back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.families import family_tensors
from megalite.checkpoint.family_table import family_page
from megalite.checkpoint.hf_config import hf_config
from megalite.cli import convert
from megalite.config.load import load_config
from megalite.errors import CheckpointError
from megalite.topology.families import FAMILIES
from megalite.topology.parameters import ModelShape, RopeScaling, canonical_tensors
from tests.support.tiny import FAMILY_SHAPES, tiny_shape


@pytest.mark.parametrize("shape", FAMILY_SHAPES.values(), ids=FAMILY_SHAPES)
def test_every_tensor_lands_exactly_once(shape):
    landed = [part for tensor in family_tensors(shape) for part in tensor.parts]
    assert sorted(landed) == sorted(canonical_tensors(shape))


@pytest.mark.parametrize("shape", FAMILY_SHAPES.values(), ids=FAMILY_SHAPES)
def test_names_and_shapes_are_those_of_transformers(shape, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, torch.float32, {})))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in family_tensors(shape)} == theirs


@pytest.mark.parametrize("shape", FAMILY_SHAPES.values(), ids=FAMILY_SHAPES)
@pytest.mark.parametrize("written_by", ["megalite", "transformers"])
def test_a_configuration_reads_back_as_the_same_shape(shape, written_by, tmp_path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, torch.float32, {})))
    if written_by == "transformers":
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert read(tmp_path) == shape


def read(folder) -> ModelShape:
    settings = {
        "model.hf_config": str(folder),
        "training.steps": "1",
        "training.sequence_length": "8",
        "training.global_batch_size": "1",
        "training.micro_batch_size": "1",
        "data.source": "text.txt",
        "tokenizer.vocab_size": "101",
    }
    overrides = [text for key, value in settings.items() for text in (f"--{key}", value)]
    return load_config(None, overrides).model.shape(0)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"norm_placement": "post"}, "model.norm_placement = post (llama has pre)"),
        ("llama", {"sliding_window": 8}, "model.sliding_window = 8 (llama has None)"),
        ("llama", {"attention_bias": True}, "model.attention_output_bias = False (llama has True)"),
        ("mistral", {"qk_norm": True}, "model.qk_norm = True (mistral has False)"),
        ("gpt2", {"num_key_value_heads": 4}, "model.num_key_value_heads = 4 (gpt2 has 8)"),
        ("phi3", {"rope_scaling": RopeScaling("linear", 2.0)}, "model.rope_scaling = {"),
        ("phi3", {"attention_bias": True}, "model.attention_bias = True (phi3 has False)"),
        (
            "gpt2",
            {"rope_scaling": RopeScaling("linear", 2.0)},
            "model.rope_scaling",
        ),
    ],
)
def test_what_a_family_cannot_express_is_refused_by_name(family, change, named):
    shape = replace(FAMILY_SHAPES[family] if family != "llama" else tiny_shape(), **change)
    with pytest.raises(CheckpointError) as refused:
        hf_config(shape, torch.float32, {})
    assert named in str(refused.value)


def test_the_page_of_all_tensors_is_that_of_the_code(capsys):
    assert convert.run(["families"]) == 0
    page = capsys.readouterr().out
    assert (Path(__file__).parents[3] / "docs" / "families.md").read_text() == page, (
        "write it anew: megalite convert families > docs/families.md"
    )
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        f"## {family.architecture.split('For')[0].removesuffix('LMHeadModel')}"
        for family in FAMILIES.values()
    ]


@pytest.mark.parametrize(
    "line",
    [
        "| `lm_head.weight` | V x H | the same | rows | untied |",
        "| `model.layers.*.self_attn.k_proj.bias` | K D | the same | rows, by key-value heads | `attention_bias` |",
        "| `model.layers.*.self_attn.o_proj.weight` | H x N D | the same | columns | always |",
        "| `model.layers.*.self_attn.qkv_proj.weight` | (N D + 2 K D) x H |"
        " `model.layers.*.self_attn.{q, k, v}_proj.weight` | rows, by query heads; rows, by key-value heads | always |",
        "| `transformer.h.*.mlp.c_proj.weight` | F x H | `model.layers.*.mlp.down_proj.weight`, transposed |"
        " columns | always |",
        "| `transformer.wpe.weight` | P x H | `model.embed_positions.weight` | whole on every rank | always |",
    ],
)
def test_lines_of_the_page(line):
    assert line in family_page().splitlines()


def test_every_family_has_a_tiny_shape():
    assert {shape.family for shape in FAMILY_SHAPES.values()} == set(FAMILIES)
