"""Weights in FP8 with a factor for each block of 128 x 128, as DeepSeek-V3 and Qwen publish them."""

import json
from collections.abc import Callable
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
from megalite.errors import CheckpointError, ConfigError
from megalite.families.registry import FAMILIES, family_tensors, hf_config, model_tensors
from megalite.topology.experts import MixtureShape
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice
from tests.support.tiny import MIXTURE_SHAPES

# Two blocks and a part of a third in each direction of some matrices.
SHAPE = replace(
    MIXTURE_SHAPES["qwen3_moe"], hidden_size=272, intermediate_size=300, num_hidden_layers=1, head_dim=34
)
OF_TRANSFORMERS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}


def in_fp8(folder: Path, shape: ModelShape = SHAPE) -> dict[str, Tensor]:
    """Write a folder whose linears are in FP8; return each tensor of the family as it is meant, in float32."""
    generator, files, meant = torch.Generator().manual_seed(3), dict[str, Tensor](), dict[str, Tensor]()
    for tensor in family_tensors(shape):
        values = torch.randn(tensor.shape, generator=generator)
        inner = (
            len(tensor.shape) == 2 and ".layers." in tensor.name and not tensor.name.endswith("gate.weight")
        )
        if not inner:
            files[tensor.name] = values.bfloat16()
            meant[tensor.name] = values.bfloat16().float()
            continue
        blocks = [-(-size // 128) for size in tensor.shape]
        factors = torch.rand(blocks, generator=generator) + 0.1
        files[tensor.name], files[f"{tensor.name}_scale_inv"] = values.to(torch.float8_e4m3fn), factors
        wide = torch.kron(factors, torch.ones(128, 128))[: tensor.shape[0], : tensor.shape[1]]
        meant[tensor.name] = files[tensor.name].float() * wide
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    config = hf_config(shape, "bfloat16", {}) | {"quantization_config": OF_TRANSFORMERS}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def test_every_region_is_the_product_with_the_factors_of_its_blocks(tmp_path: Path) -> None:
    meant = in_fp8(tmp_path)
    regions = [(0, 272, 0, 272), (120, 136, 0, 272), (127, 129, 127, 129), (200, 272, 256, 271)]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert shape_of_folder(str(tmp_path)) == SHAPE
    with HuggingFaceReader(tmp_path, SHAPE) as reader:
        for top, bottom, left, right in regions:
            region = TensorSlice((top, left), (bottom - top, right - left))
            read = reader.read("weight", name, region)
            assert read.dtype == torch.float32
            assert torch.equal(read, meant[name][top:bottom, left:right])
        for part, size in canonical_tensors(SHAPE).items():
            assert torch.equal(reader.read("weight", part, full_slice(size)).float(), meant[part]), part
        assert reader.dtypes == {torch.bfloat16, torch.float32}


def test_it_reads_what_transformers_makes_of_whole_blocks(tmp_path: Path) -> None:
    """transformers divides a matrix into as many equal blocks as there are factors: it has no part of a block."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    assert isinstance(SHAPE, MixtureShape) and SHAPE.experts is not None
    experts = replace(SHAPE.experts, moe_intermediate_size=128)
    shape = replace(SHAPE, hidden_size=256, head_dim=32, experts=experts)
    in_fp8(tmp_path, shape)
    plain = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=plain)
    theirs = dict(model.named_parameters())
    with HuggingFaceReader(tmp_path, shape) as reader:
        for tensor in model_tensors(shape):
            regions = [full_slice(canonical_tensors(shape)[part]) for part in tensor.parts]
            parts = [
                reader.read("weight", part, each) for part, each in zip(tensor.parts, regions, strict=True)
            ]
            ours = as_family_tensor(tensor, [part.float() for part in parts])
            assert torch.equal(theirs[tensor.name].float(), ours), tensor.name


def test_an_imported_folder_is_exported_without_fp8(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    meant = in_fp8(theirs)
    checkpoint = import_checkpoint(theirs, SHAPE, tmp_path / "run")
    with CheckpointReader(checkpoint) as reader:
        for part, size in canonical_tensors(SHAPE).items():
            assert torch.equal(reader.read("weight", part, full_slice(size)), meant[part]), part
    folder = export(checkpoint, tmp_path / "ours", None).folder
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    exported = load_file(folder / "model.safetensors")
    assert exported.keys() == meant.keys()
    assert all(torch.equal(exported[name], meant[name]) for name in meant)


def test_it_is_told() -> None:
    [note] = notes_of(FAMILIES["qwen3_moe"], {"quantization_config": OF_TRANSFORMERS})
    assert "has weights in FP8" in note


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files, name: files.pop(f"{name}_scale_inv"), r"q_proj.weight is of F8_E4M3; use weights of"),
        (
            lambda files, name: files.update({f"{name}_scale_inv": torch.ones(3, 2)}),
            r"q_proj.weight_scale_inv has shape \(3, 2\), but its config.json gives \(3, 3\)",
        ),
        (
            lambda files, name: files.update({f"{name}_scale_inv": torch.full((3, 3), torch.inf)}),
            r"q_proj.weight_scale_inv.*inf",
        ),
    ],
    ids=["no factors", "too few", "infinite"],
)
def test_a_weight_without_its_factors_is_refused(
    change: Callable[[dict[str, Tensor], str], object], words: str, tmp_path: Path
) -> None:
    in_fp8(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    change(files, name)
    save_file(files, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=words), HuggingFaceReader(tmp_path, SHAPE) as reader:
        reader.read("weight", name, full_slice((272, 272)))


@pytest.mark.parametrize(
    "change", [{"weight_block_size": [64, 64]}, {"weight_block_size": None}, {"fmt": "e5m2"}]
)
def test_other_forms_of_fp8_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    in_fp8(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has a quantization_config"):
        shape_of_folder(str(tmp_path))
