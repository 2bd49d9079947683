"""The table of each family: every tensor once, under transformers' names, and a configuration that reads back."""

import json
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from megalite import families
from megalite.cli import convert
from megalite.config.load import load_run
from megalite.config.sections.schema import ModelConfig
from megalite.config.sections.shape_settings import rope_setting
from megalite.convert.huggingface.export import as_family_tensor
from megalite.errors import CheckpointError
from megalite.families.fields import EXPERT_SETTINGS, LATENT_SETTINGS
from megalite.families.registry import FAMILIES, family_tensors, hf_config
from megalite.families.rope import SCALINGS
from megalite.families.table import family_page
from megalite.families.tensors import QKV, Fused, TensorNames
from megalite.topology.experts import ExpertShape, MixtureShape
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape, RopeScaling
from megalite.topology.sharding import TensorSlice
from tests.support import reported_faults as faults
from tests.support.huggingface import names_in_files
from tests.support.museum import exhibit
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES, tiny_shape

SCALED_SHAPES = {
    "dynamic": replace(tiny_shape(), rope_scaling=RopeScaling("dynamic", 2.0)),
    "yarn": replace(tiny_shape(), rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=16)),
    "yarn, given": replace(
        FAMILY_SHAPES["qwen3"],
        rope_scaling=RopeScaling(
            "yarn", 4.0, 1.0, 4.0, 16, beta_fast=8.0, truncate=False, mscale=1.2, mscale_all_dim=0.7
        ),
    ),
    "longrope": replace(
        tiny_shape(),
        rope_scaling=RopeScaling(
            "longrope",
            4.0,
            1.0,
            4.0,
            16,
            attention_factor=1.2,
            short_factor=(1.0, 1.1, 1.2),
            long_factor=(2.0,) * 3,
        ),
    ),
    "phi3": replace(
        FAMILY_SHAPES["phi3"],
        rope_scaling=RopeScaling(
            "longrope", 4.0, 1.0, 4.0, 16, short_factor=(1.0, 1.1, 1.2), long_factor=(2.0,) * 3
        ),
    ),
    "phi3, a part of each head": replace(
        FAMILY_SHAPES["phi3, a part of each head"],
        rope_scaling=RopeScaling(
            "longrope", 4.0, 1.0, 4.0, 16, short_factor=(1.0, 1.1), long_factor=(2.0, 3.0)
        ),
    ),
}
SHAPES = {**FAMILY_SHAPES, **MIXTURE_SHAPES}
READ_BACK = {**SHAPES, **{f"{name} scaling": shape for name, shape in SCALED_SHAPES.items()}}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_tensor_lands_exactly_once(shape):
    landed = [part for tensor in family_tensors(shape) for part in tensor.parts]
    assert sorted(landed) == sorted(canonical_tensors(shape))


@pytest.mark.parametrize("shape", FAMILY_SHAPES.values(), ids=FAMILY_SHAPES)
def test_names_and_shapes_are_those_of_transformers(shape, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, "float32", {"pad_token_id": 3})))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    padding_row = 3 if FAMILIES[shape.family].has_padding_row else None
    assert model.get_input_embeddings().padding_idx == padding_row
    names = names_in_files(model)
    theirs = {names[name]: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in family_tensors(shape)} == theirs


@exhibit(
    "gpt-neox#1208",
    also=("gpt-neox PR#1209",),
    subject="folders",
    there="the exported config.json lacked the width of the MLP, and transformers assumed another one",
    here="a config.json reads back as the same model, with any width",
    fault=faults.CONFIG_LACKS_THE_MLP_S_WIDTH,
    case="megalite-gpt_neox",
)
@pytest.mark.parametrize("shape", READ_BACK.values(), ids=READ_BACK)
@pytest.mark.parametrize("written_by", ["megalite", "transformers"])
def test_a_configuration_reads_back_as_the_same_shape(shape, written_by, tmp_path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, "float32", {})))
    if written_by == "transformers":
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert read(tmp_path) == shape


def test_longrope_of_phi3_in_the_words_of_transformers_4(tmp_path):
    """As in Phi-3-mini-128k: its length before stands outside of rope_scaling, and no factor anywhere."""
    words = {"type": "su", "short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 2.0, 2.0]}
    shape = SCALED_SHAPES["phi3"]
    written = hf_config(shape, "float32", {})
    assert written["rope_scaling"] == words | {"type": "longrope"}
    assert written["original_max_position_embeddings"] == 16
    del written["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(written | {"rope_scaling": words}))
    assert read(tmp_path) == shape


# As published: by the words of transformers 4, where what is its default is left out.
PUBLISHED = {
    "gemma": {"hidden_act": "gelu", "hidden_activation": None, "head_dim": 10},
    "gemma2": {"attn_logit_softcapping": None, "query_pre_attn_scalar": 20, "sliding_window": 6},
    "gemma2 with a window everywhere": {"layer_types": ["sliding_attention"] * 4},
    "gemma2 with none": {"layer_types": ["full_attention"] * 4, "sliding_window": None},
    "gemma2 by default": {"final_logit_softcapping": 7.5},
    "gemma3_text": {
        "rope_theta": 1e5,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 6,
        "sliding_window_pattern": 3,
    },
    "gemma3_text by default": {"num_hidden_layers": 7, "final_logit_softcapping": 3.0},
    "gpt_neox": {
        "hidden_size": 64,
        "num_key_value_heads": None,
        "rotary_pct": 0.5,
        "rotary_emb_base": 500,
        "use_parallel_residual": False,
        "attention_bias": False,
    },
    "gpt_neox by default": {"hidden_size": 64, "num_key_value_heads": None, "tie_word_embeddings": True},
    "phi": {"hidden_size": 64, "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    "phi by default": {"hidden_size": 64, "num_key_value_heads": None},
    "starcoder2": {"sliding_window": 6, "rope_theta": 500.0, "use_bias": False, "tie_word_embeddings": False},
    "starcoder2 by default": {},
}
_PUBLISHED_SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


@pytest.mark.parametrize("given", PUBLISHED)
def test_what_a_published_configuration_leaves_out_is_as_transformers_has_it(given, tmp_path):
    from transformers import AutoConfig

    family = given.split()[0]
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": family, **_PUBLISHED_SIZES, **PUBLISHED[given]})
    )
    shape, theirs = read(tmp_path), AutoConfig.from_pretrained(tmp_path).to_dict()
    written = hf_config(shape, "float32", {"bos_token_id": 2, "eos_token_id": 1})
    (tmp_path / "config.json").write_text(json.dumps(written))
    ours = AutoConfig.from_pretrained(tmp_path).to_dict()
    # Keys that do not change results: padding is an ordinary id here, and hidden_activation another name of hidden_act.
    computed = theirs.keys() - {"pad_token_id", "dtype", "architectures", "hidden_activation"}
    different = {name for name in computed if (ours.get(name) or None) != (theirs[name] or None)}
    assert not different, {name: (theirs[name], ours.get(name)) for name in different}


# transformers' own model fails without.
_WITHOUT_DEFAULT = {"deepseek_v2": {"num_experts_per_tok": 2}}


@pytest.mark.parametrize("given", [{}, {"hidden_size": 512, "num_attention_heads": 64}], ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_a_configuration_lacks_is_as_transformers_has_it(model_type, given, tmp_path):
    from transformers import AutoConfig

    keys = {FAMILIES[model_type].keys[name]: value for name, value in given.items()} | _WITHOUT_DEFAULT.get(
        model_type, {}
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **keys}))
    ours, theirs = asdict(read(tmp_path)), AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(theirs.to_dict()))
    for name, value in asdict(read(tmp_path)).items():
        assert ours[name] == value, name


@pytest.mark.parametrize("name", ["gelu", "gelu_fast", "gelu_new"])
def test_other_names_of_an_activation_are_that_activation(name, tmp_path):
    from transformers.activations import ACT2FN

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "hidden_act": name}))
    values = torch.linspace(-4, 4, 33)
    built = ACT2FN[read(tmp_path).hidden_act](values)
    assert_close(built, ACT2FN[name](values), rtol=FLOAT32_RTOL, what=name)


def test_every_family_is_a_module_of_the_folder():
    modules = {f"megalite.families.{file.stem}" for file in Path(families.__file__).parent.glob("*.py")}
    defined = [getattr(import_module(name), "FAMILY", None) for name in modules]
    assert {id(each) for each in defined if each is not None} == set(map(id, FAMILIES.values()))


def test_every_field_of_a_shape_is_a_setting():
    settings = ModelConfig.model_fields
    # The first is several settings, and the second a section.
    assert {each.name for each in fields(ModelShape)} - settings.keys() == {"rope_scaling", "adapter"}
    used = {name for names in SCALINGS.values() for name in names}
    assert {"rope_type", *map(rope_setting, used)} <= settings.keys()
    assert {each.name for each in fields(ExpertShape)} - EXPERT_SETTINGS.keys() == {"shared_gate"}
    assert {*EXPERT_SETTINGS.values(), *LATENT_SETTINGS} <= settings.keys()
    assert used <= {each.name for each in fields(RopeScaling)}


def test_projections_interleaved_by_head():
    """GPT-NeoX's query_key_value: the rows of one head's query, key and value, then those of the next head."""
    shape = replace(tiny_shape(layers=1), num_key_value_heads=8)
    prefix = "gpt_neox.layers.0.attention.query_key_value"
    names = TensorNames(
        modules={"model.layers": "gpt_neox.layers", "model.embed_tokens": "gpt_neox.embed_in"},
        fusions=(Fused("attention.query_key_value", QKV, by_head=True),),
    )
    canonical = canonical_tensors(shape)
    found = {tensor.name: tensor for tensor in names.tensors(shape)}
    assert "gpt_neox.embed_in.weight" in found and names.of("lm_head.weight") == "lm_head.weight"
    tensor = found[f"{prefix}.weight"]
    parts = [torch.randn(canonical[part]) for part in tensor.parts]
    theirs = as_family_tensor(tensor, parts)
    assert theirs.shape == tensor.shape == (3 * 48, 48)
    expected = torch.stack([part.view(8, 6, 48) for part in parts], dim=1)
    assert torch.equal(theirs.view(8, 3, 6, 48), expected)
    for part, values in zip(tensor.parts, parts, strict=True):
        for first, count in ((0, 48), (5, 14), (12, 6)):
            regions = tensor.slices(part, TensorSlice((first, 0), (count, 48)), canonical)
            rows = [theirs[region.offsets[0] : region.offsets[0] + region.shape[0]] for region in regions]
            assert torch.equal(torch.cat(rows), values[first : first + count])


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
    return load_run(None, overrides).config.model.shape(0)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"norm_placement": "post"}, "model.norm_placement = post (llama has pre)"),
        ("llama", {"sliding_window": 8}, "model.sliding_window = 8 (llama has None)"),
        ("llama", {"attention_bias": True}, "model.attention_output_bias = False (llama has True)"),
        ("mistral", {"qk_norm": "head"}, "model.qk_norm = head (mistral has None)"),
        ("mistral", {"zero_centered_gamma": True}, "model.zero_centered_gamma = True (mistral has False)"),
        ("gemma2", {"rope_local_base_freq": 5.0}, "model.rope_local_base_freq = 5.0 (gemma2 has None)"),
        (
            "gemma3",
            {"attn_logit_softcapping": 5.0},
            "model.attn_logit_softcapping = 5.0 (gemma3_text has None)",
        ),
        ("gemma2", {"tie_word_embeddings": False}, "model.tie_word_embeddings = False (gemma2 has True)"),
        ("gpt2", {"num_key_value_heads": 4}, "model.num_key_value_heads = 4 (gpt2 has 8)"),
        (
            "gpt_neox",
            {"norm_placement": "sandwich"},
            "model.norm_placement = sandwich (gpt_neox has parallel)",
        ),
        ("phi", {"tie_word_embeddings": True}, "model.tie_word_embeddings = True (phi has False)"),
        ("starcoder2", {"mlp_bias": False}, "model.mlp_bias = False (starcoder2 has True)"),
        (
            "phi3",
            {"rope_scaling": RopeScaling("linear", 2.0)},
            "model.rope_scaling = linear (phi3 has default)",
        ),
        (
            "phi3",
            {"rope_scaling": RopeScaling("longrope", 2.0, 1.0, 4.0, 16)},
            "model.rope_factor = 2.0 (phi3 has 4.0)",
        ),
        ("mixtral", {"norm_topk_prob": False}, "model.norm_topk_prob = False (mixtral has True)"),
        ("qwen3_moe", {"n_group": 5}, "model.n_group = 5 (qwen3_moe has 1)"),
        ("qwen3_moe", {"correction_bias": True}, "model.router_correction_bias = True (qwen3_moe has False)"),
        ("olmoe", {"moe_intermediate_size": 21}, "model.moe_intermediate_size = 21 (olmoe has 20)"),
        ("phi3", {"attention_bias": True}, "model.attention_bias = True (phi3 has False)"),
        (
            "gpt2",
            {"rope_scaling": RopeScaling("linear", 2.0)},
            "model.rope_scaling",
        ),
    ],
)
def test_what_a_family_cannot_express_is_refused_by_name(family, change, named):
    shape = SHAPES[family] if family != "llama" else tiny_shape()
    if isinstance(shape, MixtureShape):
        assert shape.experts is not None
        change = {"experts": replace(shape.experts, **change)}
    shape = replace(shape, **change)
    with pytest.raises(CheckpointError) as refused:
        hf_config(shape, "float32", {})
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
        "| `model.layers.*.block_sparse_moe.experts.*.w2.weight` | H x F |"
        " `model.layers.*.mlp.experts.*.down_proj.weight` | columns, of each expert | always |",
        "| `model.layers.*.mlp.experts.*.up_proj.weight` | M x H | the same | rows, of each expert |"
        " layers with experts |",
        "| `transformer.wpe.weight` | P x H | `model.embed_positions.weight` | whole on every rank | always |",
    ],
)
def test_lines_of_the_page(line):
    assert line in family_page(FAMILIES.values()).splitlines()


def test_every_family_has_a_tiny_shape():
    assert {shape.family for shape in SHAPES.values()} == set(FAMILIES)
