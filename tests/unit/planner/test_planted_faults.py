"""Faults in the formulas of mixtures and cut sequences: each turns a test of these formulas red."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from megalite.planner.planned_run import PlannedRun
from megalite.topology import experts, parameters
from megalite.topology.context import ContextMethod, ContextSizes, context_traffic
from megalite.topology.experts import BlockTensor, ExpertShape, MixtureShape
from tests.unit.planner import test_context, test_experts, test_mixture_counts


def changed(tensors: Callable[..., Iterator[BlockTensor]], change: Callable[..., Any]) -> Any:
    """Return `tensors` with each tensor in place of it as `change` lists it."""
    return lambda shape, *rest: (each for tensor in tensors(shape, *rest) for each in change(tensor, shape))


def without_shared_experts(tensor: BlockTensor, _: MixtureShape) -> list[BlockTensor]:
    return [] if "shared_experts" in tensor.name else [tensor]


def with_two_biases(tensor: BlockTensor, _: MixtureShape) -> list[BlockTensor]:
    return [tensor] * (2 if tensor.name == "mlp.gate.bias" else 1)


def with_rotated_values_of_each_head(tensor: BlockTensor, shape: MixtureShape) -> list[BlockTensor]:
    assert shape.latent is not None
    if not tensor.name.endswith("kv_a_proj_with_mqa.weight"):
        return [tensor]
    more = (shape.num_attention_heads - 1) * shape.latent.qk_rope_head_dim
    return [replace(tensor, shape=(tensor.shape[0] + more, tensor.shape[1]))]


def one_more_dense_layer(experts: ExpertShape, layer: int) -> bool:
    dense = layer <= experts.first_k_dense_replace or layer in experts.mlp_only_layers
    return not dense and (layer + 1) % experts.decoder_sparse_step == 0


@pytest.mark.parametrize(
    ("target", "attribute", "fault", "model"),
    [
        (
            parameters,
            "expert_tensors",
            changed(experts.expert_tensors, without_shared_experts),
            "DeepSeek-V2-Lite",
        ),
        (parameters, "expert_tensors", changed(experts.expert_tensors, with_two_biases), "gpt-oss 20b"),
        (
            parameters,
            "latent_tensors",
            changed(experts.latent_tensors, with_rotated_values_of_each_head),
            "DeepSeek-V2-Lite",
        ),
        (ExpertShape, "in_layer", one_more_dense_layer, "DeepSeek-V2-Lite"),
    ],
    ids=["no shared expert", "two router biases", "rotated values of each head", "one more dense layer"],
)
def test_a_wrong_tensor_changes_the_count(
    monkeypatch: pytest.MonkeyPatch, target: Any, attribute: str, fault: Any, model: str
) -> None:
    monkeypatch.setattr(target, attribute, fault)
    with pytest.raises(AssertionError):
        test_mixture_counts.test_mixtures_of_any_size_have_the_parameters_of_transformers(model)


def test_a_ring_of_one_send_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(sizes: ContextSizes, method: ContextMethod, *, recomputed: bool = False) -> float:
        return context_traffic(replace(sizes, ranks=sizes.ranks + 1), method, recomputed=recomputed)

    monkeypatch.setattr(test_context, "context_traffic", one_more)
    with pytest.raises(AssertionError):
        test_context.test_a_ring_sends_what_its_rotations_send(4, False)


def test_experts_partitioned_over_all_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlannedRun, "expert_copies", PlannedRun.copies)
    with pytest.raises(AssertionError):
        test_experts.test_states_of_a_rank_are_counted_over_the_ranks(3, 4)
