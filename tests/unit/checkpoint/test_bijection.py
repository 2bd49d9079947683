"""Every element of a Hugging Face folder lands where it is to land, and nothing else does; and goes back from there.

Each element of the folders read here is its own number, so that what a rank holds says where it came from.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.weights import fill
from megalite.convert.huggingface import export as huggingface
from megalite.convert.huggingface.export import as_family_tensor
from megalite.convert.weight_source import WeightSource
from megalite.convert.weights import open_weights
from megalite.families.registry import FAMILIES, family_tensors
from megalite.topology.axes import Layout
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from tests.support import reported_faults as faults
from tests.support.checkpoints import NoOptimizer, save_checkpoint
from tests.support.museum import exhibit
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES
from tests.unit.checkpoint.worlds import HeldStage, ThreadMesh, World, on_all_ranks

T = TypeVar("T")
LAYOUTS = {
    "tensor 2, data 2": (Layout(tensor=2, data=2), None),
    "pipeline 4": (Layout(pipeline=4), None),
    "tensor 4, uneven pipeline 2": (Layout(pipeline=2, tensor=4), (3, 1)),
}


def variants() -> dict[str, ModelShape]:
    """Every family's shapes, the head tied and not, and key-value heads that four ranks have to share."""
    found = {}
    for name, shape in {**FAMILY_SHAPES, **MIXTURE_SHAPES}.items():
        head = "untied" if shape.tie_word_embeddings else "tied"
        found[shape] = name
        found.setdefault(replace(shape, tie_word_embeddings=head == "tied"), f"{name}, {head}")
        if "num_key_value_heads" in FAMILIES[shape.family].free:
            found[replace(shape, num_key_value_heads=2)] = f"{name}, shared heads"
    return {name: shape for shape, name in found.items()}


VARIANTS = variants()


def numbered(shape: ModelShape) -> dict[str, Tensor]:
    """Every tensor of the folder, its elements counted on from those before it."""
    tensors, first = {}, 0
    for tensor in family_tensors(shape):
        size = prod(tensor.shape)
        tensors[tensor.name] = torch.arange(first, first + size, dtype=torch.float32).view(tensor.shape)
        first += size
    assert first < 2**24, "float32 has no more whole numbers"
    return tensors


def imported(world: World, folder: Path, mesh: ThreadMesh) -> HeldStage:
    """Return a rank's values after the import; nan where none was written."""
    sizes = {each.name: mesh.local_shape(each) for each in world.parameters(mesh)}
    stage = HeldStage({name: torch.full(size, torch.nan) for name, size in sizes.items()})
    source = WeightSource(folder, "huggingface", world.shape)
    fill(world.replica(mesh, stage), open_weights(source), folder)
    return stage


def on_every_rank(layout: Layout, action: Callable[[ThreadMesh], T]) -> list[T]:
    outcomes = on_all_ranks(layout, action)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def holders(name: str, shape: ModelShape, tensor: int) -> int:
    """How many tensor-parallel ranks are to hold each element of a canonical tensor."""
    # A norm over all heads is cut as the heads are; a norm over each head is whole on every rank.
    normed = "|[{}]_norm" if shape.qk_norm == "full" else ""
    if re.search(rf"[kv]_proj\.{normed.format('k')}", name):
        return max(1, tensor // shape.num_key_value_heads)
    cut = rf"embed_tokens|lm_head|sinks|(q|q_b|kv_b|gate|up)_proj\.|(o|down)_proj\.weight{normed.format('q')}"
    return 1 if re.search(cut, name) else tensor


def expected_counts(shape: ModelShape, tensor: int) -> Tensor:
    """For each number of `numbered`, how many ranks are to hold it."""
    counts = []
    sizes = canonical_tensors(shape)
    for each in family_tensors(shape):
        parts = [torch.full(sizes[part], holders(part, shape, tensor)) for part in each.parts]
        counts.append(as_family_tensor(each, parts).flatten())
    return torch.cat(counts)


@pytest.mark.parametrize("tensor", cases([1, 2, 4], core=[4]))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_element_of_the_folder_lands_exactly_once(tmp_path: Path, variant: str, tensor: int) -> None:
    shape = VARIANTS[variant]
    source = numbered(shape)
    save_file(source, tmp_path / "model.safetensors")
    total = sum(tensor.numel() for tensor in source.values())
    counts = torch.zeros(total, dtype=torch.long)
    world = World(shape, Layout(tensor=tensor))
    for stage in on_every_rank(world.layout, lambda mesh: imported(world, tmp_path, mesh)):
        held = torch.cat([values.flatten() for values in stage.tensors.values()])
        assert not held.isnan().any(), "a parameter was left unfilled"
        once = held.long().bincount(minlength=total)
        assert once.max() == 1, "an element stands twice on one rank"
        counts += once
    assert torch.equal(counts, expected_counts(shape, tensor))


@exhibit(
    "gpt-neox PR#1220",
    also=("gpt-neox PR#1072",),
    subject="folders",
    there="biases of row-parallel layers were divided or multiplied when tensor-parallel ranks were joined",
    here="every element returns to its place with its value, from any layout",
    fault=faults.BIASES_OF_ROWS_ARE_SUMMED,
    case="gpt_neox-tensor 4, uneven pipeline 2",
)
@pytest.mark.parametrize("layout", cases(LAYOUTS, core=["tensor 4, uneven pipeline 2"]))
@pytest.mark.parametrize("variant", VARIANTS)
def test_export_puts_every_element_back(tmp_path: Path, variant: str, layout: str) -> None:
    world = World(VARIANTS[variant], *LAYOUTS[layout])
    source = numbered(world.shape)
    save_file(source, tmp_path / "model.safetensors")

    def into_a_checkpoint(mesh: ThreadMesh) -> Path:
        return save_checkpoint(
            tmp_path / "checkpoints",
            world.replica(mesh, imported(world, tmp_path, mesh)),
            NoOptimizer(),
            trainer_state={"step": 0, "samples": 0, "tokens": 0},
            config={},
        )

    [checkpoint, *_] = on_every_rank(world.layout, into_a_checkpoint)
    (tmp_path / "export").mkdir()
    with CheckpointReader(checkpoint) as reader:
        huggingface._write_weights(reader, tmp_path / "export", torch.float32, 10**9)
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert written.keys() == source.keys()
    for name, values in source.items():
        assert torch.equal(written[name], values), name


def test_every_family_is_here() -> None:
    assert {shape.family for shape in VARIANTS.values()} == FAMILIES.keys()
