"""Megatron-LM checkpoints of every layout, version and generation of names, imported: each element exactly once."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.checkpoint.weights import fill
from megalite.errors import CheckpointError
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape, RopeScaling
from megalite.topology.stages import pipeline_split
from tests.support.foreign import Imported, import_folder
from tests.support.megatron_writer import Written, write_megatron
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.unit.convert.exporting import our_logits

GPT2 = FAMILY_SHAPES["gpt2"]
LLAMA = tiny_shape()


def numbered(shape: ModelShape) -> dict[str, Tensor]:
    """Canonical weights, no two elements of which are alike."""
    first, weights = 0, {}
    for name, size in canonical_tensors(shape).items():
        weights[name] = torch.arange(first, first + prod(size), dtype=torch.float64).view(size)
        first += prod(size)
    return weights


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    with CheckpointReader(checkpoint) as reader:
        entries = reader.manifest.tensors[WEIGHT]
        return {name: reader.read(WEIGHT, name, full_slice(entry.shape)) for name, entry in entries.items()}


def imported(tmp_path: Path, shape: ModelShape, how: Written, **changes: Any) -> Imported:
    write_megatron(tmp_path / "megatron", shape, numbered(shape), how, **changes)
    return import_folder(tmp_path / "megatron", tmp_path / "run")


WAYS = {
    **{
        f"{names}, tp {tensor}, pp {pipeline}, {chunks} chunk(s)": (GPT2 if names == "old" else LLAMA, how)
        for names in ("core", "local", "legacy", "old")
        for tensor, pipeline, chunks in ((1, 1, 1), (2, 1, 1), (4, 2, 1), (2, 2, 2))
        for how in [Written(tensor, pipeline, chunks, names=names)]
    },
    **{
        f"version {version:g}, tp {tensor}": (GPT2, Written(tensor, version=version, names="legacy"))
        for version in (0.0, 1.0, 2.0, 3.0)
        for tensor in (1, 2, 4)
    },
    "more ranks than groups": (replace(LLAMA, num_key_value_heads=2), Written(4)),
    "one group": (replace(LLAMA, num_key_value_heads=1), Written(2)),
    "tied over two stages": (replace(LLAMA, tie_word_embeddings=True), Written(2, 2)),
    "tied over two stages, older": (replace(LLAMA, tie_word_embeddings=True), Written(2, 2, names="legacy")),
    "no padding": (replace(LLAMA, vocab_size=104), Written(2, padded=104)),
    "llama with biases": (FAMILY_SHAPES["llama with biases"], Written(2)),
    "rope scaled": (
        replace(LLAMA, rope_theta=500.0, rope_scaling=RopeScaling("linear", 3.0)),
        Written(),
    ),
    "mistral": (FAMILY_SHAPES["mistral"], Written(2)),
    "qwen2": (replace(FAMILY_SHAPES["qwen2"], sliding_window=None, full_attention_layers=0), Written(4)),
    "qwen3": (FAMILY_SHAPES["qwen3"], Written(2, 2)),
    "gpt2 untied": (FAMILY_SHAPES["gpt2 untied"], Written(2)),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_element_lands_exactly_once(tmp_path: Path, way: str) -> None:
    shape, how = WAYS[way]
    done = imported(tmp_path, shape, how)
    assert done.shape == shape and done.step == 1000 and not done.notes
    found, expected = weights_of(done.checkpoint), numbered(shape)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is torch.float64 and torch.equal(found[name], tensor), name


def logits_of(done: Imported, input_ids: Tensor) -> Tensor:
    mesh, split = ParallelMesh.single(), pipeline_split(done.shape.num_hidden_layers)
    replica = build_replica(done.shape, mesh, split, seed=None)
    replica.stage.to(done.dtype)
    fill(replica, CheckpointReader(done.checkpoint), done.checkpoint)
    return our_logits(replica.stage, input_ids)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Weights as after training: no norm of ones, no bias of zeros."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(
                0.15 * noise + (1.0 if "norm" in name or "ln_" in name else 0.0) * (tensor.dim() == 1)
            )
    return model.eval()


def of_gpt2(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """transformers' GPT-2 as canonical weights, by hand: its linears are stored [in, out]."""
    found = {
        "model.embed_tokens.weight": state["transformer.wte.weight"],
        "model.embed_positions.weight": state["transformer.wpe.weight"],
        **{f"model.norm.{kind}": state[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")},
    }
    for layer in range(layers):
        theirs, ours = f"transformer.h.{layer}", f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            fused = state[f"{theirs}.attn.c_attn.{kind}"]
            for part, rows in zip("qkv", fused.split(fused.shape[-1] // 3, dim=-1), strict=True):
                found[f"{ours}.self_attn.{part}_proj.{kind}"] = rows.t()
            for name, module in (
                ("self_attn.o_proj", "attn.c_proj"),
                ("mlp.up_proj", "mlp.c_fc"),
                ("mlp.down_proj", "mlp.c_proj"),
            ):
                found[f"{ours}.{name}.{kind}"] = state[f"{theirs}.{module}.{kind}"].t()
            found[f"{ours}.input_layernorm.{kind}"] = state[f"{theirs}.ln_1.{kind}"]
            found[f"{ours}.post_attention_layernorm.{kind}"] = state[f"{theirs}.ln_2.{kind}"]
    return found


@pytest.mark.parametrize("names", ["core", "legacy"])
@pytest.mark.parametrize("fused", [True, False], ids=["tanh", "exact gelu"])
def test_logits_are_those_of_transformers_gpt2(tmp_path: Path, names: str, fused: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2
    config = GPT2Config(
        vocab_size=101,
        n_embd=48,
        n_inner=76,
        n_layer=4,
        n_head=8,
        n_positions=64,
        activation_function="gelu_new" if fused else "gelu",
    )
    model = randomised(GPT2LMHeadModel(config))
    weights = of_gpt2(dict(model.state_dict()), 4)
    folder = write_megatron(
        tmp_path / "megatron", shape, weights, Written(2, 2, names=names), bias_gelu_fusion=fused
    )
    done = import_folder(folder, tmp_path / "run")
    assert done.shape.hidden_act == ("gelu_pytorch_tanh" if fused else "gelu")
    ids = torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_close(logits_of(done, ids), model(ids).logits, rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("kind", ["llama", "llama tied", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 76,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": kind.endswith("tied"),
    }
    config = AutoConfig.for_model(kind.split()[0], **sizes)
    model = randomised(AutoModelForCausalLM.from_config(config))
    shape = replace(
        tiny_shape(tied=kind.endswith("tied")),
        family=kind.split()[0],
        attention_bias=kind == "qwen2",
        qk_norm="head" if kind == "qwen3" else None,
    )
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    done = import_folder(
        write_megatron(tmp_path / "megatron", shape, weights, Written(4, 2)), tmp_path / "run"
    )
    assert done.shape == shape
    ids = torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_close(logits_of(done, ids), model(ids).logits, rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_keep_their_type(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: (tensor % 251).to(dtype) for name, tensor in numbered(LLAMA).items()}
    write_megatron(tmp_path / "megatron", LLAMA, weights, Written(2))
    done = import_folder(tmp_path / "megatron", tmp_path / "run")
    assert done.dtype is dtype
    for name, tensor in weights_of(done.checkpoint).items():
        assert tensor.dtype is dtype and torch.equal(tensor, weights[name])


def test_files_of_torch_before_zip_are_read(tmp_path: Path) -> None:
    done = imported(tmp_path, GPT2, Written(2, version=1.0, names="old"), zipped=False)
    for name, tensor in numbered(GPT2).items():
        assert torch.equal(weights_of(done.checkpoint)[name], tensor)


@pytest.mark.parametrize("form", ["iteration", "release", "model_rng.pt"])
def test_every_form_of_the_folder_is_found(tmp_path: Path, form: str) -> None:
    folder = write_megatron(tmp_path / "megatron", LLAMA, numbered(LLAMA), Written(2))
    tracker, iteration = folder / "latest_checkpointed_iteration.txt", folder / "iter_0001000"
    if form == "iteration":
        tracker.unlink()
        folder = iteration
    elif form == "release":
        tracker.write_text("release\n")
        iteration.rename(folder / "release")
    else:
        for path in iteration.glob("*/model_optim_rng.pt"):
            path.rename(path.with_name("model_rng.pt"))
    assert import_folder(folder, tmp_path / "run").shape == LLAMA


def test_a_vocabulary_whose_size_is_not_said_has_to_be_given(tmp_path: Path) -> None:
    folder = write_megatron(tmp_path / "megatron", LLAMA, numbered(LLAMA), Written(2), vocab_size=None)
    with pytest.raises(CheckpointError, match=r"padded to 128 rows.*--vocab-size \(128 keeps them all\)"):
        import_folder(folder, tmp_path / "run")
    with pytest.raises(CheckpointError, match="128 rows, but --vocab-size or its args give 129 tokens"):
        import_folder(folder, tmp_path / "run", vocab_size=129)
    assert import_folder(folder, tmp_path / "run", vocab_size=101).shape == LLAMA
    whole = import_folder(folder, tmp_path / "all", vocab_size=128)
    assert torch.all(weights_of(whole.checkpoint)["model.embed_tokens.weight"][101:] == -7)


def test_the_tokenizer_of_numbers_has_one_more(tmp_path: Path) -> None:
    done = imported(tmp_path, LLAMA, Written(), vocab_size=100, tokenizer_type="NullTokenizer")
    assert done.shape.vocab_size == 101
