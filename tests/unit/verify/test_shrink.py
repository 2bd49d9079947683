"""The small run of a verification keeps what decides the path through the code, and says all that it changed."""

from typing import Any

import pytest

from megalite.config.flags import as_flags
from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.verify.shrink import alone, shrunk, with_every_expert

BASE: dict[str, Any] = {
    "model": {"preset": "llama-3.1-8b"},
    "training": {"steps": 100, "sequence_length": 4096, "micro_batch_size": 1, "global_batch_size": 64},
    "data": {"source": "book.txt"},
}


def config(**sections: dict[str, Any]) -> RunConfig:
    settings = {name: BASE.get(name, {}) | sections.get(name, {}) for name in {*BASE, *sections}}
    return load_run(None, as_flags(settings)).config


def test_sizes_shrink_and_heads_stages_and_remainders_stay() -> None:
    before = config(
        model={"vocab_size": 128257, "intermediate_size": 14337},
        parallel={"tensor": 2, "pipeline": 2, "data": 2, "sequence": True},
        optimizer={"warmup_steps": 2000},
    )
    small = shrunk(before)
    after = small.config
    assert after.layout == before.layout and after.batch.micro_batches >= 4
    for name in ("num_attention_heads", "num_key_value_heads", "rope_type"):
        assert getattr(after.model, name) == getattr(before.model, name)
    for name in ("vocab_size", "intermediate_size"):
        assert getattr(after.model, name) % 2 == getattr(before.model, name) % 2
        assert getattr(after.model, name) < 400
    assert after.training.sequence_length % 2 == 0 and after.training.sequence_length < 100
    assert after.optimizer.warmup_steps == 1
    changed = {line.partition(":")[0] for line in small.changes}
    for section, values in after.model_dump().items():
        was = before.model_dump()[section] or {}
        differing = {f"{section}.{key}" for key, value in (values or {}).items() if value != was.get(key)}
        assert differing <= changed


@pytest.mark.parametrize(
    ("model", "parallel", "kept"),
    [
        ({}, {"pipeline": 2, "layers_per_stage": [20, 12]}, [3, 2]),
        ({}, {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}, [2, 2, 2, 2]),
        ({"preset": "gemma-3-1b"}, {}, [6]),
        ({"preset": "deepseek-v2-lite"}, {}, [2]),
    ],
)
def test_chunks_stay_uneven_and_every_kind_of_layer_is_left(
    model: dict[str, Any], parallel: dict[str, Any], kept: list[int]
) -> None:
    after = shrunk(config(model=model, parallel=parallel)).config
    assert [len(layers) for layers in after.split.layers] == kept
    shape, full = after.shape(300), config(model=model, parallel=parallel).shape(300)
    kinds = {full.window_of(layer) is None for layer in range(full.num_hidden_layers)}
    assert {shape.window_of(layer) is None for layer in range(shape.num_hidden_layers)} == kinds


def test_rounding_chooses_no_expert_in_narrow_types() -> None:
    dense = shrunk(config())
    assert with_every_expert(dense) is dense
    for preset, groups in (("mixtral-8x7b", 1), ("deepseek-v3", 8)):
        small = shrunk(config(model={"preset": preset}))
        every = with_every_expert(small)
        model = every.config.model
        assert model.num_experts_per_tok == model.num_experts == small.config.model.num_experts > 1
        assert model.topk_group == model.n_group == groups
        added = every.changes[len(small.changes) :]
        assert every.changes[: len(small.changes)] == small.changes
        assert (
            added[0]
            == f"model.num_experts_per_tok: {small.config.model.num_experts_per_tok} -> {model.num_experts}"
        )


def test_zero_3_still_cuts_the_small_weights() -> None:
    after = shrunk(config(parallel={"data": 2}, deepspeed={"zero_optimization": {"stage": 3}})).config
    assert after.deepspeed_json()["zero_optimization"]["stage3_param_persistence_threshold"] == 100


@pytest.mark.parametrize(
    ("optimizer", "eps"),
    [({}, 0.1), ({"eps": 0.5}, 0.5), ({"name": "muon"}, 0.1), ({"name": "lion"}, 1e-8)],
)
def test_no_update_is_of_full_size_where_a_gradient_is_rounding_noise(
    optimizer: dict[str, Any], eps: float
) -> None:
    before = config(optimizer=optimizer)
    for full_size in (False, True):
        small = shrunk(before, full_size=full_size)
        assert small.config.optimizer.eps == eps
        told = f"optimizer.eps: {before.optimizer.eps} -> {eps}"
        assert (told in small.changes) == (before.optimizer.eps != eps)
    assert small.config.model == before.model and small.config.training == before.training


def test_the_one_process_has_the_same_samples_and_none_of_the_layout() -> None:
    before = shrunk(
        config(
            parallel={"tensor": 2, "pipeline": 2, "schedule": "gpipe", "data": 2},
            training={"recompute": "full"},
            deepspeed={"zero_optimization": {"stage": 1}},
        )
    ).config
    one = alone(before)
    assert one.layout.world_size == 1 and one.zero_stage == 0 and one.training.recompute == "none"
    assert one.batch.micro_batches == 1 and one.batch.global_batch_size == before.batch.global_batch_size
    assert one.shape(1) == before.shape(1)
    parts = alone(before, micro_batches=True).batch
    assert parts.micro_batch_size == before.batch.micro_batch_size
    assert parts.micro_batches == before.batch.micro_batches * before.layout.data
    assert parts.global_batch_size == one.batch.global_batch_size
