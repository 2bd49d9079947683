"""Mixtures of experts in Hugging Face folders: both forms of transformers' files, and its words of config.json."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.config.sources.huggingface import notes_of, shape_of_folder
from megalite.convert.huggingface.export import as_family_tensor, export
from megalite.convert.huggingface.load import HuggingFaceReader, import_checkpoint
from megalite.convert.huggingface.packed_header import require_packed
from megalite.convert.peft.named import AdaptedModel, find_adapter
from megalite.errors import CheckpointError, ConfigError
from megalite.families.registry import FAMILIES, family_tensors, hf_config, model_tensors
from megalite.topology.experts import LatentAttention, MixtureShape
from megalite.topology.parameters import canonical_tensors
from megalite.topology.sharding import TensorSlice
from tests.support.selection import cases
from tests.support.tiny import MIXTURE_SHAPES

NAMES = cases(
    MIXTURE_SHAPES, core=["mixtral", "granitemoe", "qwen3_moe, dense layers, windows, biases", "gpt_oss"]
)


def their_model(shape: MixtureShape, folder: Path) -> torch.nn.Module:
    """Return transformers' model of a shape with drawn weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(hf_config(shape, "float32", {})))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def name_in_model(shape: MixtureShape, part: str) -> str:
    """Return the name of the parameter of transformers' model that holds a canonical tensor."""
    return next(tensor.name for tensor in model_tensors(shape) if part in tensor.parts)


def expert_weight(model: torch.nn.Module, shape: MixtureShape, name: str) -> Tensor:
    """Return the matrix of one expert from the parameters of transformers' model. name: canonical."""
    _, expert, module, kind = name.rsplit(".", 3)
    matrix = model.get_parameter(name_in_model(shape, name))[int(expert)]
    if model.config.model_type == "gpt_oss":
        own = matrix if module == "down_proj" else matrix[..., module == "up_proj" :: 2]
        return own.t() if kind == "weight" else own
    return matrix if module == "down_proj" else matrix.chunk(2)[module == "up_proj"]


def of_experts(shape: MixtureShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from ((name, size) for name, size in canonical_tensors(shape).items() if ".experts." in name)


@pytest.mark.parametrize("of_each_expert", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_files_of_transformers_are_read(name: str, of_each_expert: bool, tmp_path: Path) -> None:
    """Names and shapes of all tensors are those of the family's table, and each value is found in its place."""
    shape = MIXTURE_SHAPES[name]
    model = their_model(shape, tmp_path)
    model.save_pretrained(tmp_path, save_original_format=of_each_expert)
    theirs = {key: tuple(tensor.shape) for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    names = FAMILIES[shape.family].names
    tensors = tuple(names.tensors(shape)) if of_each_expert else model_tensors(shape)
    assert {tensor.name: tensor.shape for tensor in tensors} == theirs
    with HuggingFaceReader(tmp_path, shape) as reader:
        assert list(of_experts(shape))
        for part, size in of_experts(shape):
            expected = expert_weight(model, shape, part)
            assert torch.equal(reader.read("weight", part, full_slice(size)), expected)
            places = tuple(slice(count // 3, count - 1) for count in size)
            region = TensorSlice(tuple(place.start for place in places), tuple(expected[places].shape))
            assert torch.equal(reader.read("weight", part, region), expected[places])
        gate = next(part for part in canonical_tensors(shape) if part.endswith("mlp.gate.weight"))
        read = reader.read("weight", gate, full_slice(canonical_tensors(shape)[gate]))
        assert torch.equal(read, model.get_parameter(name_in_model(shape, gate)))


@pytest.mark.parametrize("name", NAMES)
def test_files_of_each_expert_are_loaded_by_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape, generator = MIXTURE_SHAPES[name], torch.Generator().manual_seed(1)
    ours = {part: torch.randn(size, generator=generator) for part, size in canonical_tensors(shape).items()}
    files = {
        tensor.name: as_family_tensor(tensor, [ours[part] for part in tensor.parts])
        for tensor in family_tensors(shape)
    }
    save_file(files, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, "float32", {})))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    for part, _ in of_experts(shape):
        assert torch.equal(expert_weight(model, shape, part), ours[part]), part


@pytest.mark.parametrize("name", NAMES)
def test_an_imported_folder_is_exported_as_it_was(name: str, tmp_path: Path) -> None:
    """The export compares each layer and the whole model with transformers' before it appears."""
    shape, theirs = MIXTURE_SHAPES[name], tmp_path / "theirs"
    theirs.mkdir()
    model = their_model(shape, theirs)
    model.save_pretrained(theirs, save_original_format=False)
    checkpoint = import_checkpoint(theirs, shape, tmp_path / "run")
    with CheckpointReader(checkpoint) as reader:
        assert reader.manifest.model == shape
    exported = export(checkpoint, tmp_path / "ours", None)
    assert [comparison.what for comparison in exported.comparisons][-1] == "whole model, logits"
    with HuggingFaceReader(exported.folder, shape) as ours, HuggingFaceReader(theirs, shape) as before:
        for part, size in canonical_tensors(shape).items():
            region = full_slice(size)
            assert torch.equal(ours.read("weight", part, region), before.read("weight", part, region)), part


def test_a_folder_without_an_expert_is_refused(tmp_path: Path) -> None:
    shape = MIXTURE_SHAPES["mixtral"]
    their_model(shape, tmp_path).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.block_sparse_moe.experts.4.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks.*layers\.2\.block_sparse_moe\.experts\.4\.w3"):
        HuggingFaceReader(tmp_path, shape)


def test_an_adapter_of_experts_is_refused(tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "w1"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    model = AdaptedModel(tmp_path, MIXTURE_SHAPES["mixtral"], int8=False)
    with pytest.raises(CheckpointError, match=r"has adapters of experts, which no request.*merges it"):
        find_adapter("own", tmp_path, model)


def test_a_matrix_that_is_whole_on_every_rank_has_no_int8_form() -> None:
    latent = LatentAttention(8, 4, 4, 8, q_lora_rank=8)
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.self_attn\.q_a_proj\.weight has no int8 form here"
    ):
        require_packed(replace(MIXTURE_SHAPES["qwen3_moe"], latent=latent))
    require_packed(MIXTURE_SHAPES["qwen3_moe"])


@pytest.mark.parametrize("name", MIXTURE_SHAPES)
def test_the_numbers_of_a_configuration_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    shape = MIXTURE_SHAPES[name]
    assert shape.experts is not None
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape, "float32", {})))
    theirs = AutoConfig.from_pretrained(tmp_path)
    width = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    assert {getattr(theirs, name) for name in names if hasattr(theirs, name)} == {shape.experts.num_experts}
    assert (theirs.num_experts_per_tok, width) == (2, 20)
    shared = getattr(theirs, "shared_intermediate_size", getattr(theirs, "n_shared_experts", 0) * width)
    assert shared == shape.experts.shared_intermediate_size
    for name in ("routed_scaling_factor", "n_group", "topk_group"):
        assert getattr(theirs, name, 1) == getattr(shape.experts, name)
    assert getattr(theirs, "first_k_dense_replace", 0) == shape.experts.first_k_dense_replace
    windows = "sliding_attention" in (getattr(theirs, "layer_types", None) or ["sliding_attention"])
    assert (getattr(theirs, "sliding_window", None) if windows else None) == shape.sliding_window
    # Mixtral's router always divides by the sum, and has no key for it.
    assert getattr(theirs, "norm_topk_prob", True) == shape.experts.norm_topk_prob
    assert tuple(getattr(theirs, "mlp_only_layers", ())) == shape.experts.mlp_only_layers
    assert getattr(theirs, "decoder_sparse_step", 1) == shape.experts.decoder_sparse_step


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3"])
def test_the_number_of_experts_has_two_names(model_type: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, key: 12}))
    shape = shape_of_folder(str(tmp_path))
    assert isinstance(shape, MixtureShape) and shape.experts is not None
    assert shape.experts.num_experts == 12


def test_noise_of_the_router_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "router_jitter_noise": 0.1}))
    with pytest.raises(ConfigError, match=r"has router_jitter_noise = 0\.1"):
        shape_of_folder(str(tmp_path))


def test_a_loss_of_transformers_that_is_not_computed_is_told() -> None:
    config = {"model_type": "olmoe", "router_aux_loss_coef": 0.01}
    assert not list(notes_of(FAMILIES["olmoe"], config))
    [note] = notes_of(FAMILIES["olmoe"], config | {"output_router_logits": True})
    assert "router_aux_loss_coef = 0.01" in note and "training.router_balance" in note
