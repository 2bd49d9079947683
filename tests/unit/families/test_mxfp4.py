"""MXFP4 weights of gpt-oss are read as transformers decodes them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megalite.checkpoint.regions import full_slice
from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.huggingface.export import as_family_tensor, export
from megalite.convert.huggingface.load import HuggingFaceReader, import_checkpoint
from megalite.errors import CheckpointError
from megalite.families.registry import family_tensors, hf_config
from megalite.families.tensors import InterleavedExperts
from megalite.topology.parameters import canonical_tensors
from megalite.topology.sharding import TensorSlice
from tests.support.tiny import mixture_of

SHAPE = mixture_of(
    "gpt_oss", hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=2
)
PUBLISHED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def write_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Write a folder in two files, blocks apart from scales; return the weights as transformers decodes them."""
    drawn = torch.Generator().manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    decoded = {}
    for tensor in family_tensors(SHAPE):
        if isinstance(tensor, InterleavedExperts) and len(tensor.shape) == 3:
            experts, columns, rows = tensor.shape
            size = (experts, rows, columns // 32)
            blocks = torch.randint(256, (*size, 16), generator=drawn, dtype=torch.uint8)
            scales = torch.randint(118, 126, size, generator=drawn, dtype=torch.uint8)
            scales[0, 0, 0] = 0
            decoded[tensor.name] = convert_moe_packed_tensors(blocks, scales)
            files[0][f"{tensor.name}_blocks"], files[1][f"{tensor.name}_scales"] = blocks, scales
        else:
            decoded[tensor.name] = (torch.randn(tensor.shape, generator=drawn) / 8).bfloat16()
            files[0][tensor.name] = decoded[tensor.name]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    where = {name: file for file, tensors in zip(names, files, strict=True) for name in tensors}
    for file, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = hf_config(SHAPE, "bfloat16", {}) | {"quantization_config": PUBLISHED}
    (folder / "config.json").write_text(json.dumps(config))
    return decoded


def test_every_region_is_that_of_transformers(tmp_path: Path) -> None:
    decoded = write_folder(tmp_path)
    assert shape_of_folder(str(tmp_path)) == SHAPE
    sizes = canonical_tensors(SHAPE)
    with HuggingFaceReader(tmp_path, SHAPE) as reader:
        assert reader.dtypes == {torch.bfloat16}
        for tensor in family_tensors(SHAPE):
            parts = [reader.read("weight", part, full_slice(sizes[part])) for part in tensor.parts]
            assert torch.equal(as_family_tensor(tensor, parts), decoded[tensor.name]), tensor.name
        for part in ("gate_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.3.{part}.weight"
            whole = reader.read("weight", name, full_slice(sizes[name]))
            for first, count in ((0, 5), (31, 2), (40, 24)):
                region = TensorSlice((7, first), (11, count))
                read = reader.read("weight", name, region)
                assert torch.equal(read, whole[7:18, first : first + count])


def test_an_export_of_them_is_bfloat16_and_transformers_own(tmp_path: Path) -> None:
    """The export compares each layer and the whole model with transformers' before it appears."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    decoded = write_folder(theirs)
    exported = export(
        import_checkpoint(theirs, SHAPE, tmp_path / "run"), tmp_path / "ours", None, dtype=torch.bfloat16
    )
    assert "quantization_config" not in json.loads((exported.folder / "config.json").read_text())
    [file] = exported.files
    written = load_file(exported.folder / file)
    assert written.keys() == decoded.keys()
    assert all(torch.equal(written[name], values) for name, values in decoded.items())


def test_blocks_without_scales_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    tensors = load_file(second)
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, second, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.down_proj"):
        HuggingFaceReader(tmp_path, SHAPE)
