"""An int8 folder computes what a float model with the rounded weights does, in every layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.convert.huggingface.export import export
from megalite.convert.huggingface.quantise import quantise_folder
from megalite.errors import CheckpointError
from megalite.evaluate.scoring import score_batch
from megalite.evaluate.windows import Window
from megalite.generation.loaded import LoadedModel, load_source
from megalite.generation.source import find_source
from megalite.model.transformer import Stage
from megalite.ops.linear import dequantised, quantise_rows
from megalite.parallel.int8 import Int8Weight
from megalite.parallel.layers import ColumnParallelLinear, ExpertLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from tests.support.parity import LAYOUT_RTOL, assert_close
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, our_logits, save_stage

LENGTH = 24
MIXTURES = ("mixtral", "qwen3_moe, dense layers, windows, biases", "olmoe")
SHAPES = {**FAMILY_SHAPES, **MIXTURE_SHAPES}


def token_ids(rows: int) -> Tensor:
    return torch.randint(101, (rows, LENGTH), generator=torch.Generator().manual_seed(4))


def exported(folder: Path, family: str) -> Stage:
    """Write a model's export and int8 folder, and a tokenizer; return the model with rounded linears, in float64."""
    shape = SHAPES[family]
    export(save_stage(folder, shape, lively_stage(shape)), folder / "plain", None)
    (folder / "int8").mkdir()
    quantise_folder(folder / "plain", folder / "int8")
    tiny_tokenizer(folder)
    rounded = loaded(folder, ParallelMesh.single(), "plain").model
    for module in rounded.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | ExpertLinear):
            values, scale = quantise_rows(module.weight.detach().float(), torch.float32)
            module.weight.data = dequantised(values, scale, torch.float64)
    return rounded


def loaded(folder: Path, mesh: ParallelMesh, name: str = "int8") -> LoadedModel:
    source = find_source(folder / name, tokenizer=folder / "tokenizer.json")
    return load_source(source, mesh, torch.float64)


@pytest.mark.parametrize(
    "family",
    cases(
        ["llama with biases", "phi3", "gpt_neox", "starcoder2", "qwen3", *MIXTURES],
        core=["llama with biases", "phi3", "gpt_neox", "mixtral"],
    ),
)
def test_logits_are_those_of_the_rounded_weights(tmp_path: Path, family: str) -> None:
    expected = our_logits(exported(tmp_path, family), token_ids(3))
    model = loaded(tmp_path, ParallelMesh.single())
    assert_close(model.logits(token_ids(3)), expected, rtol=LAYOUT_RTOL)
    # A few rows an expert, which the compiled operator takes.
    assert_close(model.logits(token_ids(3)[:1, :3]), expected[:1, :3], rtol=LAYOUT_RTOL)
    held = {module.weight.dtype for module in model.model.modules() if isinstance(module, Int8Weight)}
    assert held == {torch.int8}
    assert not any(name.endswith("_proj.weight") for name, _ in model.model.named_parameters())


def log_probs(folder: Path, layout: Layout) -> Tensor | None:
    """Return the log-probability of each next token, on the ranks with the last chunk."""
    ids = token_ids(3).numpy().astype(np.int32)
    model = loaded(folder, ParallelMesh.over_world(layout))
    scored = score_batch(model.replica, [Window(row[:-1], row[1:]) for row in ids])
    return None if scored is None else scored[0]


LAYOUTS = [
    ("llama with biases", Layout(pipeline=2, tensor=2)),
    ("gpt_neox", Layout(tensor=4)),
    ("llama with biases", Layout(tensor=2)),
    *((family, Layout(pipeline=2, tensor=2)) for family in MIXTURES),
]


@pytest.mark.parametrize(
    ("family", "layout"),
    cases(LAYOUTS, core=[LAYOUTS[0], ("mixtral", Layout(pipeline=2, tensor=2))]),
    ids=str,
)
def test_every_layout_computes_the_same(ranks, tmp_path: Path, family: str, layout: Layout) -> None:
    ids = token_ids(3)
    logits = our_logits(exported(tmp_path, family), ids)[:, :-1].log_softmax(-1)
    expected = logits.gather(-1, ids[:, 1:].unsqueeze(-1)).flatten()
    found = ranks.run(log_probs, layout.world_size, folder=tmp_path, layout=layout)
    assert sum(each is not None for each in found) == layout.tensor
    for each in found:
        if each is not None:
            assert_close(each, expected, rtol=LAYOUT_RTOL)


def test_the_files_are_in_compressed_tensors_form(tmp_path: Path) -> None:
    exported(tmp_path, "llama 3")
    plain, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "int8"))
    for name, weight in plain.items():
        if "_proj" not in name:
            assert torch.equal(stored.pop(name), weight)
            continue
        packed, scale, shape = (stored.pop(f"{name}_{part}") for part in ("packed", "scale", "shape"))
        assert shape.tolist() == list(weight.shape) and scale.shape == (weight.shape[0], 1)
        # The first column is in the lowest byte.
        columns = [(packed >> (8 * byte) & 255) - 128 for byte in range(4)]
        values = torch.stack(columns, dim=-1).flatten(1)
        assert ((values * scale - weight).abs() <= 0.501 * scale).all()
    assert not stored


def test_matrices_stored_transposed_are_refused(tmp_path: Path) -> None:
    shape = FAMILY_SHAPES["gpt2"]
    export(save_stage(tmp_path, shape, lively_stage(shape)), tmp_path / "plain", None)
    with pytest.raises(CheckpointError, match=r"no form for gpt2.*export without --quantise"):
        quantise_folder(tmp_path / "plain", tmp_path / "int8")
