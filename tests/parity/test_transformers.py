"""Logits and every gradient equal those of transformers' models with the same weights, in float32."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from megalite.convert.huggingface.export import as_family_tensor
from megalite.families.registry import hf_config, model_tensors
from megalite.model.stages import build_replica
from megalite.model.transformer import Stage
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.experts import CORRECTION_BIAS, MixtureShape
from megalite.topology.parameters import model_parameters
from megalite.topology.shape import ModelShape, RopeScaling
from megalite.topology.stages import pipeline_split
from tests.support.huggingface import names_in_files
from tests.support.parity import FLOAT32_GRADIENT_RTOL, FLOAT32_RTOL, assert_close, assert_same_tensors
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES, tiny_batch, tiny_shape
from tests.support.training import full_tensors, shards_of

_ORIGINAL = "original_max_position_embeddings"
LONGROPE = {"short_factor": (1.0, 1.1, 1.5), "long_factor": (1.0, 2.5, 6.0)}
SHAPES = {
    "untied, grouped heads": tiny_shape(tied=False),
    "tied, grouped heads": tiny_shape(tied=True),
    "one key-value head": replace(tiny_shape(), num_key_value_heads=1),
    "as many key-value heads as heads": replace(tiny_shape(), num_key_value_heads=8),
    "heads wider than the hidden size": replace(tiny_shape(), head_dim=10, rope_theta=500000.0),
    "phi3 tied, without window": replace(
        FAMILY_SHAPES["phi3"], tie_word_embeddings=True, sliding_window=None, num_key_value_heads=8
    ),
    "dynamic, beyond the positions": replace(
        tiny_shape(), max_position_embeddings=8, rope_scaling=RopeScaling("dynamic", 2.0)
    ),
    "qwen2, yarn": replace(
        FAMILY_SHAPES["qwen2"], rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=16)
    ),
    "llama, yarn of DeepSeek": replace(
        tiny_shape(),
        rope_scaling=RopeScaling(
            "yarn",
            4.0,
            original_max_position_embeddings=16,
            beta_fast=8.0,
            truncate=False,
            mscale=1.2,
            mscale_all_dim=0.7,
        ),
    ),
    "phi3, longrope": replace(
        FAMILY_SHAPES["phi3"], rope_scaling=RopeScaling("longrope", 1.0, **LONGROPE | {_ORIGINAL: 64})
    ),
    "phi3, longrope beyond the original length": replace(
        FAMILY_SHAPES["phi3"], rope_scaling=RopeScaling("longrope", 8.0, **LONGROPE | {_ORIGINAL: 8})
    ),
    "phi3, longrope of a part of each head": replace(
        FAMILY_SHAPES["phi3, a part of each head"],
        rope_scaling=RopeScaling(
            "longrope",
            8.0,
            short_factor=(1.0, 1.5),
            long_factor=(2.5, 6.0),
            original_max_position_embeddings=8,
        ),
    ),
    **FAMILY_SHAPES,
    **MIXTURE_SHAPES,
}


def _transformers_model(shape: ModelShape, folder: Path) -> nn.Module:
    """A model of transformers from our config.json, with eager attention, not the kernel that our side calls."""
    (folder / "config.json").write_text(json.dumps(hf_config(shape, "float32", {})))
    config = AutoConfig.from_pretrained(folder)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_config(config, **eager).eval()


def _in_their_names(shape: ModelShape, canonical: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        tensor.name: as_family_tensor(tensor, [canonical[part] for part in tensor.parts])
        for tensor in model_tensors(shape)
    }


def _names(shape: ModelShape, model: nn.Module) -> dict[str, str]:
    """Return tensor of their model -> its name in `_in_their_names`: that of files, but for stacked experts."""
    if isinstance(shape, MixtureShape):
        return {name: name for name in model.state_dict()}
    return names_in_files(model)


def _canonical(stage: Stage, shape: ModelShape, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shards = shards_of(model_parameters(shape), tensors, ParallelMesh.single())
    return full_tensors(shape, shards, add=False)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_and_gradients_equal_transformers(shape, tmp_path):
    stage = build_replica(
        shape, ParallelMesh.single(), pipeline_split(shape.num_hidden_layers), seed=11
    ).stage
    generator = torch.Generator().manual_seed(5)
    # Larger than the initial norms of 1 and weights of 0.02, so that no term hides behind another.
    with torch.no_grad():
        for tensor in stage.parameters():
            tensor.mul_(2).add_(torch.randn(tensor.shape, generator=generator), alpha=0.03)
    model = _transformers_model(shape, tmp_path)
    weights = _in_their_names(shape, _canonical(stage, shape, dict(stage.named_parameters())))
    names = _names(shape, model)
    given = {name: weights[stored].float() for name, stored in names.items() if stored in weights}
    assert len(given) == len(weights)
    missing = model.load_state_dict(given, strict=False)
    assert missing.missing_keys == (["lm_head.weight"] if shape.tie_word_embeddings else [])
    model.tie_weights()

    batch = tiny_batch(shape, 5)
    expected = model(input_ids=batch.input_ids).logits
    with torch.no_grad():
        logits = stage.whole.logits(stage.whole.decode(batch.input_ids, batch.position_ids))
    assert_close(logits, expected, rtol=FLOAT32_RTOL, what="logits")

    token_losses = torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), batch.labels.flatten(), reduction="none", ignore_index=-100
    )
    (token_losses * batch.loss_mask.flatten()).sum().backward()
    losses = stage(batch.input_ids, batch=batch)
    losses.sum().backward()
    assert_close(
        losses.sum(), (token_losses * batch.loss_mask.flatten()).sum(), rtol=FLOAT32_RTOL, what="loss"
    )
    # Biases of routers have none, and are no parameters there.
    gradients = {
        name: tensor.grad if tensor.requires_grad else torch.zeros_like(tensor)
        for name, tensor in stage.named_parameters()
    }
    theirs = {names[name]: tensor.grad.double() for name, tensor in model.named_parameters()}
    ours = _in_their_names(shape, _canonical(stage, shape, gradients))
    ours = {name: tensor for name, tensor in ours.items() if not name.endswith(CORRECTION_BIAS)}
    assert_same_tensors(ours, theirs, rtol=FLOAT32_GRADIENT_RTOL)
