"""A folder of the first layers of another one has their bytes, a config.json of as many layers, and the same words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.huggingface.first_layers import write_first_layers
from megalite.convert.huggingface.load import HuggingFaceReader
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES
from tests.unit.verify.test_from_folder import written

SHAPES = FAMILY_SHAPES | MIXTURE_SHAPES
CORE = ("gemma3", "gpt2", "gpt_oss", "deepseek_v3", "smollm3 with windows")
DENSE_LAST = "qwen3_moe, dense layers, windows, biases"


@pytest.mark.parametrize("name", cases([*SHAPES], core=[*CORE, DENSE_LAST]))
def test_the_first_layers_are_read_as_a_model_of_their_own(tmp_path: Path, name: str) -> None:
    folder, cut = written(tmp_path / "folder", SHAPES[name]), tmp_path / "cut"
    shape = replace(SHAPES[name], num_hidden_layers=3)
    write_first_layers(folder, shape, cut)
    read = shape_of_folder(str(cut))
    assert read.num_hidden_layers == 3
    for layer in range(3):
        assert read.window_of(layer) == shape.window_of(layer) and read.rotates(layer) == shape.rotates(layer)
        assert read.has_experts(layer) == shape.has_experts(layer)
    config = json.loads((cut / "config.json").read_text())
    assert all(len(config[key]) == 3 for key in ("layer_types", "no_rope_layers") if key in config)
    assert all(layer < 3 for layer in config.get("mlp_only_layers", ()))
    with HuggingFaceReader(cut, read):
        pass
    before = load_file(folder / "model.safetensors")
    after = load_file(cut / "model.safetensors")
    assert all(torch.equal(before[name], values) for name, values in after.items())
    assert not any(".3." in name.removeprefix("transformer.") for name in after if ".experts." not in name)


def test_files_without_a_tensor_that_is_kept_are_not_opened(tmp_path: Path) -> None:
    shape = MIXTURE_SHAPES["deepseek_v3"]
    folder = written(tmp_path / "folder", shape)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    # Files are missing: of the last layer, and of one behind it, which predicts further tokens.
    where = {name: "0.safetensors" for name in tensors}
    where |= {name: "1.safetensors" for name in tensors if name.startswith("model.layers.3.")}
    where["model.layers.4.eh_proj.weight"] = "2.safetensors"
    where["model.norm.weight"] = "3.safetensors"
    for file in ("0.safetensors", "3.safetensors"):
        save_file({name: tensors[name] for name, at in where.items() if at == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    (folder / "tokenizer.json").write_text("{}")
    write_first_layers(folder, replace(shape, num_hidden_layers=3), tmp_path / "cut")
    after = load_file(tmp_path / "cut" / "model.safetensors")
    assert after.keys() == {name for name, at in where.items() if at in ("0.safetensors", "3.safetensors")}
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert (tmp_path / "cut" / "tokenizer.json").read_text() == "{}"


def test_packed_values_and_names_of_the_bare_model_are_cut_too(tmp_path: Path) -> None:
    shape = FAMILY_SHAPES["gpt2"]
    folder = written(tmp_path / "folder", shape)
    bare = {
        name.removeprefix("transformer."): values
        for name, values in load_file(folder / "model.safetensors").items()
    }
    bare["h.0.packed"], bare["h.1.packed"] = (
        torch.full((2, 3), value, dtype=torch.uint8) for value in (7, 8)
    )
    bare["h.0.factors"] = torch.ones(3, 2).to(torch.float8_e4m3fn)
    save_file(bare, folder / "model.safetensors")
    write_first_layers(folder, replace(shape, num_hidden_layers=1), tmp_path / "cut")
    after = load_file(tmp_path / "cut" / "model.safetensors")
    assert after.keys() == {name for name in bare if not name.startswith(("h.1.", "h.2.", "h.3."))}
    assert torch.equal(after["h.0.packed"], bare["h.0.packed"])
    assert torch.equal(after["h.0.factors"].float(), bare["h.0.factors"].float())
