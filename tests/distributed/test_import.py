"""A Hugging Face folder in, any layout, a Hugging Face folder out: bit for bit; and what is no such folder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.checkpoint.weights import fill
from megalite.convert.huggingface import load as hf_import
from megalite.convert.huggingface.export import export
from megalite.convert.weight_source import WeightSource
from megalite.convert.weights import open_weights
from megalite.errors import CheckpointError
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from tests.support.parity import assert_same_tensors
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Shard, full_tensors, shards_of
from tests.unit.convert.exporting import lively_stage, save_stage


def imported(folder: Path, shape: ModelShape, layout: Layout) -> list[Shard]:
    mesh = ParallelMesh.over_world(layout)
    split = pipeline_split(shape.num_hidden_layers, layout.pipeline)
    replica = build_replica(shape, mesh, split, seed=None)
    fill(replica, open_weights(WeightSource(folder, "huggingface", shape)), folder)
    return shards_of(replica.parameters, replica.tensors, mesh)


@pytest.mark.parametrize("shape", FAMILY_SHAPES.values(), ids=FAMILY_SHAPES)
def test_every_layout_reads_its_slices_bit_for_bit(ranks, tmp_path, shape):
    stage = lively_stage(shape)
    export(save_stage(tmp_path, shape, stage), tmp_path / "export", None, shard_size_bytes=60_000)
    [written] = ranks.run(_weights, world_size=1, checkpoint_of=tmp_path, shape=shape)
    for layout in (Layout(), Layout(pipeline=2, tensor=2)):
        results = ranks.run(
            imported, world_size=layout.world_size, folder=tmp_path / "export", shape=shape, layout=layout
        )
        read = full_tensors(shape, [shard for result in results for shard in result], add=False)
        assert_same_tensors(read, written, rtol=0)


@pytest.mark.parametrize("family", ["llama 3", "gpt2", "gpt_neox"])
def test_what_is_read_in_pieces_is_the_same(tmp_path, monkeypatch, family):
    folder = exported(tmp_path, FAMILY_SHAPES[family])
    whole = read_alone(folder, FAMILY_SHAPES[family])
    monkeypatch.setattr(hf_import, "BLOCK_ELEMENTS", 100)
    assert_same_tensors(read_alone(folder, FAMILY_SHAPES[family]), whole, rtol=0)


def _weights(checkpoint_of: Path, shape: ModelShape) -> dict[str, torch.Tensor]:
    from megalite.checkpoint.folder import find_checkpoint
    from megalite.checkpoint.manifest import WEIGHT
    from megalite.checkpoint.reader import CheckpointReader
    from megalite.checkpoint.regions import full_slice

    with CheckpointReader(find_checkpoint(checkpoint_of)) as reader:
        entries = reader.manifest.tensors[WEIGHT]
        return {
            name: reader.read(WEIGHT, name, full_slice(entry.shape)).double()
            for name, entry in entries.items()
        }


def _drop(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


DAMAGE = {
    "a missing tensor": (
        _drop("model.layers.1.mlp.up_proj.weight"),
        "lacks model.layers.1.mlp.up_proj.weight; use the config.json of these weights",
    ),
    "an unknown tensor": (
        lambda tensors: {**tensors, "model.layers.0.self_attn.rope.scale": torch.ones(2)},
        "has model.layers.0.self_attn.rope.scale, which the model of its config.json lacks",
    ),
    "another shape": (
        lambda tensors: {**tensors, "model.norm.weight": torch.ones(47)},
        "model.norm.weight has shape (47,), but its config.json gives (48,)",
    ),
    "a head that is not the embedding": (
        lambda tensors: {**tensors, "lm_head.weight": torch.ones(101, 48)},
        "lm_head.weight differs from the embedding, but its config.json ties the two",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_of_another_model_is_refused_by_name(tmp_path, damage):
    change, said = DAMAGE[damage]
    folder = exported(tmp_path, tiny_shape(tied=True))
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        read_alone(folder, tiny_shape(tied=True))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("family", "buffer"),
    [("gpt2", "h.{}.attn.bias"), ("gpt_neox", "gpt_neox.layers.{}.attention.masked_bias")],
)
def test_what_old_files_hold_beside_the_weights_is_passed_over(tmp_path, family, buffer):
    shape = replace(FAMILY_SHAPES[family], num_hidden_layers=2)
    folder = exported(tmp_path, shape)
    expected = read_alone(folder, shape)
    bare = {
        name.removeprefix("transformer."): values
        for name, values in load_file(folder / "model.safetensors").items()
    }
    masks = {buffer.format(layer): torch.ones(1, 1, 8, 8) for layer in range(2)}
    save_file({**bare, **masks}, folder / "model.safetensors")
    assert_same_tensors(read_alone(folder, shape), expected, rtol=0)


def test_an_embedding_stored_twice_is_one_if_it_is_equal(tmp_path):
    shape = tiny_shape(tied=True)
    folder = exported(tmp_path, shape)
    expected = read_alone(folder, shape)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
    )
    assert_same_tensors(read_alone(folder, shape), expected, rtol=0)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no model.safetensors and no model.safetensors.index.json"),
        ({"model.safetensors": b"\x00" * 40}, "cannot be read"),
        ({"model.safetensors.index.json": b"[]"}, "is not an index of weights"),
        (
            {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "../b"}}).encode()},
            "names files outside of its folder",
        ),
        (
            {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "gone.safetensors"}}).encode()},
            "cannot be read",
        ),
    ],
)
def test_what_is_no_folder_of_weights_is_refused(tmp_path, files, said):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        read_alone(tmp_path, tiny_shape())
    assert said in str(refused.value)


def exported(folder: Path, shape: ModelShape) -> Path:
    export(save_stage(folder, shape, lively_stage(shape)), folder / "export", None)
    return folder / "export"


def read_alone(folder: Path, shape: ModelShape) -> dict[str, torch.Tensor]:
    mesh, split = ParallelMesh.single(), pipeline_split(shape.num_hidden_layers)
    replica = build_replica(shape, mesh, split, seed=None)
    fill(replica, open_weights(WeightSource(folder, "huggingface", shape)), folder)
    return {name: tensor.detach().double() for name, tensor in replica.tensors.items()}
