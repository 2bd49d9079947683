"""Logits and every gradient equal those of transformers' Llama with the same weights, in float32."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megalite.model.stages import build_stage
from megalite.model.transformer import Stage
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.layout import pipeline_split
from megalite.topology.parameters import ModelShape, model_parameters
from tests.support.parity import FLOAT32_RTOL, assert_close, assert_same_tensors
from tests.support.tiny import tiny_batch, tiny_shape
from tests.support.training import full_tensors, shards_of

SHAPES = {
    "untied, grouped heads": tiny_shape(tied=False),
    "tied, grouped heads": tiny_shape(tied=True),
    "one key-value head": replace(tiny_shape(), num_key_value_heads=1),
    "as many key-value heads as heads": replace(tiny_shape(), num_key_value_heads=8),
    "heads wider than the hidden size": replace(tiny_shape(), head_dim=10, rope_theta=500000.0),
}


def _transformers_model(shape: ModelShape) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_word_embeddings,
    )
    return LlamaForCausalLM(config)


def _canonical(stage: Stage, shape: ModelShape, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shards = shards_of(model_parameters(shape), tensors, ParallelMesh.single())
    return full_tensors(shape, shards, add=False)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_and_gradients_equal_transformers(shape):
    stage = build_stage(shape, ParallelMesh.single(), pipeline_split(shape.num_hidden_layers), seed=11)
    # Larger than the initial norms of 1 and weights of 0.02, so that no term hides behind another.
    with torch.no_grad():
        for tensor in stage.parameters():
            tensor.mul_(3).add_(torch.randn_like(tensor), alpha=0.05)
    model = _transformers_model(shape)
    weights = _canonical(stage, shape, dict(stage.named_parameters()))
    missing = model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    assert not missing.unexpected_keys
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
    losses = stage(
        batch.input_ids,
        position_ids=batch.position_ids,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        samples=batch.samples,
    )
    losses.sum().backward()
    assert_close(
        losses.sum(), (token_losses * batch.loss_mask.flatten()).sum(), rtol=FLOAT32_RTOL, what="loss"
    )
    gradients = {name: tensor.grad for name, tensor in stage.named_parameters()}
    theirs = {name: tensor.grad.double() for name, tensor in model.named_parameters()}
    assert_same_tensors(_canonical(stage, shape, gradients), theirs, rtol=FLOAT32_RTOL)
