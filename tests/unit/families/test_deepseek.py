"""DeepSeek's folders: layers for further tokens, routers' biases in 16 bits, and keys that are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.regions import full_slice
from megalite.config.sources.huggingface import notes_of, shape_of_folder
from megalite.convert.huggingface.export import as_family_tensor, export
from megalite.convert.huggingface.load import HuggingFaceReader, import_checkpoint
from megalite.errors import CheckpointError, ConfigError
from megalite.families.registry import FAMILIES, family_tensors, hf_config
from megalite.topology.experts import MixtureShape
from megalite.topology.parameters import canonical_tensors
from tests.support.tiny import MIXTURE_SHAPES

V3 = MIXTURE_SHAPES["deepseek_v3"]
LAST = V3.num_hidden_layers


def drawn(shape: MixtureShape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(size, generator=generator) / 3 for name, size in canonical_tensors(shape).items()
    }


def written(folder: Path, ours: dict[str, Tensor], **further: Tensor) -> None:
    files = {
        tensor.name: as_family_tensor(tensor, [ours[part] for part in tensor.parts])
        for tensor in family_tensors(V3)
    }
    of_layer = {f"model.layers.{name}": tensor for name, tensor in further.items()}
    save_file(files | of_layer, folder / "model.safetensors", {"format": "pt"})
    config = hf_config(V3, "float32", {}) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def of_a_further_token(layer: int) -> dict[str, Tensor]:
    names = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "mlp.experts.0.gate_proj")
    return {f"{layer}.{name}.weight": torch.ones(2, 2) for name in names}


def test_a_layer_for_further_tokens_is_left_out_and_named(tmp_path: Path) -> None:
    ours = drawn(V3)
    written(tmp_path, ours, **of_a_further_token(LAST))
    with HuggingFaceReader(tmp_path, V3) as reader:
        for part, size in canonical_tensors(V3).items():
            assert torch.equal(reader.read("weight", part, full_slice(size)), ours[part]), part
    [note] = notes_of(FAMILIES["deepseek_v3"], json.loads((tmp_path / "config.json").read_text()))
    assert "num_nextn_predict_layers = 1 (layers from 4 on, which predict further tokens)" in note
    exported = export(import_checkpoint(tmp_path, V3, tmp_path / "run"), tmp_path / "ours", None).folder
    assert json.loads((exported / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("layer", [LAST + 1, LAST - 1])
def test_other_layers_are_not_left_out(layer: int, tmp_path: Path) -> None:
    written(tmp_path, drawn(V3), **of_a_further_token(layer))
    with pytest.raises(CheckpointError, match=rf"has model\.layers\.{layer}\.eh_proj"):
        HuggingFaceReader(tmp_path, V3)


def test_a_layer_beyond_those_of_config_json_is_not_taken_for_one_of_further_tokens(tmp_path: Path) -> None:
    written(tmp_path, drawn(V3))
    with pytest.raises(CheckpointError, match=r"has model\.layers\.3\."):
        HuggingFaceReader(tmp_path, replace(V3, num_hidden_layers=3))


def test_biases_of_routers_stay_exact_in_16_bits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = drawn(V3)
    written(tmp_path, ours)
    checkpoint = import_checkpoint(tmp_path, V3, tmp_path / "run")
    folder = export(checkpoint, tmp_path / "ours", None, dtype=torch.bfloat16).folder
    files, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {str(tensor.dtype) for key, tensor in files.items() if key != name} >= {"torch.bfloat16"}
    assert files["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for bias in (files[name], theirs.get_buffer(name)):
        assert bias.dtype == torch.float32 and torch.equal(bias, ours[name])


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            'topk_method = "noaux_tc"; only "greedy" or "group_limited',
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "has norm_topk_prob = true"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, 'has scoring_func = "sigmoid"'),
        ("deepseek_v2", {"moe_layer_freq": 2}, "has moe_layer_freq = 2"),
        (
            "deepseek_v2",
            {"num_key_value_heads": 4},
            "has num_key_value_heads = 4; only num_attention_heads, 8,",
        ),
        ("deepseek_v2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "scales its rotary frequencies"),
        ("deepseek_v3", {"rope_interleave": False}, "has rope_interleave = false; only true is supported"),
        (
            "deepseek_v3",
            {"topk_method": "greedy"},
            'has topk_method = "greedy"; only "noaux_tc" is supported',
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, 'has scoring_func = "softmax"'),
    ],
)
def test_what_is_not_built_is_refused(
    model_type: str, change: dict[str, object], words: str, tmp_path: Path
) -> None:
    config = hf_config(MIXTURE_SHAPES[model_type], "float32", {}) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as refused:
        shape_of_folder(str(tmp_path))
    assert words in str(refused.value)


@pytest.mark.parametrize("scored", [True, False])
def test_groups_count_by_their_method_alone(scored: bool, tmp_path: Path) -> None:
    """V2's file has n_group and topk_group also where its router does not look at them."""
    config = hf_config(MIXTURE_SHAPES["deepseek_v2"], "float32", {})
    config |= {} if scored else {"topk_method": "greedy"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of_folder(str(tmp_path))
    assert isinstance(shape, MixtureShape) and shape.experts is not None
    assert (shape.experts.n_group, shape.experts.topk_group) == ((3, 2) if scored else (1, 1))
