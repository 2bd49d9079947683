"""The router chooses, weighs and counts as a plain loop over tokens does, and as the routers of transformers do."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.ops.router import balance_loss, route, sequence_counts, with_loss, z_loss
from megalite.topology.experts import ExpertShape
from tests.support.parity import FLOAT32_RTOL, OPERATOR_RTOL, about, assert_close

PLAIN = ExpertShape(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=4)
SIGMOID = replace(PLAIN, router_scores="sigmoid", routed_scaling_factor=2.5)
SHAPES = {
    "softmax": PLAIN,
    "not normalised": replace(PLAIN, norm_topk_prob=False, routed_scaling_factor=16.0),
    "best groups": replace(PLAIN, n_group=4, topk_group=2),
    "one expert": replace(PLAIN, num_experts_per_tok=1),
    "all experts": replace(PLAIN, num_experts_per_tok=8),
    "sigmoid": SIGMOID,
    "sigmoid, corrected": replace(SIGMOID, correction_bias=True),
    "sigmoid, corrected, best groups": replace(SIGMOID, correction_bias=True, n_group=4, topk_group=2),
    "sigmoid, groups of one": replace(SIGMOID, n_group=8, topk_group=4),
}


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(logits: list[float], shape: ExpertShape, correction: list[float]) -> dict[int, float]:
    """Return expert -> weight of one token, the best expert first."""
    if shape.router_scores == "softmax":
        powers = [math.exp(logit) for logit in logits]
        scores = [power / sum(powers) for power in powers]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    ranking = [score + added for score, added in zip(scores, correction, strict=True)]
    size = len(scores) // shape.n_group
    experts_of = [range(group * size, (group + 1) * size) for group in range(shape.n_group)]

    def value(group: range) -> float:
        best = sorted((ranking[expert] for expert in group), reverse=True)
        return best[0] if shape.router_scores == "softmax" else sum(best[:2])

    best_groups = sorted(experts_of, key=lambda group: (-value(group), group.start))[: shape.topk_group]
    allowed = [expert for group in best_groups for expert in group]
    chosen = sorted(allowed, key=lambda expert: (-ranking[expert], expert))[: shape.num_experts_per_tok]
    total = sum(scores[expert] for expert in chosen) if shape.norm_topk_prob else 1
    return {expert: scores[expert] / total * shape.routed_scaling_factor for expert in chosen}


@pytest.mark.parametrize("rounded", [False, True], ids=["drawn", "with ties"])
@pytest.mark.parametrize("name", SHAPES)
def test_each_token_goes_where_a_plain_loop_sends_it(name: str, rounded: bool) -> None:
    shape = SHAPES[name]
    logits = drawn(50, shape.num_experts)
    correction = drawn(shape.num_experts, seed=4) - 2 if shape.correction_bias else None
    if rounded:
        logits = logits.round()
        correction = None if correction is None else correction.round()
    routing = route(logits, shape, correction)
    added = [0.0] * shape.num_experts if correction is None else correction.tolist()
    expected = [by_hand(row, shape, added) for row in logits.tolist()]
    assert routing.experts.tolist() == [[*row] for row in expected]
    assert_close(routing.weights, [[*row.values()] for row in expected], rtol=OPERATOR_RTOL)
    counts = [sum(expert in row for row in expected) for expert in range(shape.num_experts)]
    assert routing.counts.tolist() == counts
    assert_close(routing.shares.sum(dim=1), torch.ones(50), rtol=OPERATOR_RTOL, what="sums of shares")


def test_equal_scores_go_to_the_lower_experts() -> None:
    routing = route(torch.zeros(4, 160), replace(PLAIN, num_experts=160, num_experts_per_tok=6))
    assert routing.experts.tolist() == [[0, 1, 2, 3, 4, 5]] * 4


def test_no_expert_of_another_group_is_chosen_where_corrected_scores_are_negative() -> None:
    shape = replace(SIGMOID, n_group=4, topk_group=2, num_experts_per_tok=4)
    correction = torch.tensor([-3.0, -3, -2, -2, -5, -5, -6, -6])
    assert set(route(torch.zeros(1, 8), shape, correction).experts.flatten().tolist()) == {0, 1, 2, 3}


def test_vanished_scores_give_no_nan() -> None:
    routing = route(torch.full((2, 8), -2e3), SIGMOID)
    assert routing.weights.tolist() == [[0, 0, 0]] * 2 and routing.shares.isfinite().all()


@pytest.mark.parametrize("name", ["softmax", "not normalised", "sigmoid, corrected, best groups"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    shape = SHAPES[name]
    correction = drawn(8, seed=4) if shape.correction_bias else None

    def outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
        routing = route(logits, shape, correction)
        return routing.weights, routing.shares

    assert torch.autograd.gradcheck(outputs, (drawn(5, 8).requires_grad_(),))


def _config(**settings: Any) -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(hidden_size=8, num_local_experts=8, num_experts_per_tok=3, **settings)


def transformers_router(name: str) -> torch.nn.Module:
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    if name == "mixtral":
        return MixtralTopKRouter(MixtralConfig(hidden_size=8, num_local_experts=8, num_experts_per_tok=3))
    if name == "deepseek_v3":
        return DeepseekV3TopkRouter(
            _config(n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True)
        )
    settings = {"norm_topk_prob": name == "qwen3_moe"}
    return Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=8, num_experts=8, num_experts_per_tok=3, **settings))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mixtral", PLAIN),
        ("qwen3_moe", PLAIN),
        ("qwen3_moe, not normalised", replace(PLAIN, norm_topk_prob=False)),
        ("deepseek_v3", SHAPES["sigmoid, corrected, best groups"]),
    ],
)
def test_it_is_the_router_of_transformers(name: str, shape: ExpertShape) -> None:
    router = transformers_router(name)
    hidden, correction = drawn(40, 8).float(), None
    with torch.no_grad():
        router.weight.copy_(drawn(8, 8, seed=5))
        if shape.correction_bias:
            correction = drawn(8, seed=6).float() / 4
            router.e_score_correction_bias.copy_(correction)
        logits, weights, experts = router(hidden)
        routing = route(logits, shape, correction)
    # DeepSeek's are in no order.
    order, other_order = routing.experts.argsort(dim=1), experts.argsort(dim=1)
    assert torch.equal(routing.experts.gather(1, order), experts.gather(1, other_order))
    assert_close(
        routing.weights.gather(1, order), weights.gather(1, other_order), rtol=FLOAT32_RTOL, what=name
    )


def test_the_balance_loss_is_one_where_the_load_is_even_and_e_over_k_at_worst() -> None:
    experts = torch.arange(8).view(1, 4, 2)
    counts = sequence_counts(experts, 8)
    assert counts.tolist() == [[1] * 8]
    assert balance_loss(torch.full((1, 4, 8), 1 / 8), counts, 2, 4).tolist() == about([1.0])
    collapsed = torch.zeros(1, 4, 8)
    collapsed[..., :2] = 0.5
    counts = sequence_counts(torch.tensor([0, 1]).expand(1, 4, 2), 8)
    assert balance_loss(collapsed, counts, 2, 4).tolist() == about([4.0])


def test_losses_of_parts_of_a_sequence_add_up_to_those_of_the_whole() -> None:
    logits = drawn(2, 12, 8).requires_grad_()
    routing = route(logits.flatten(0, 1), SIGMOID)
    shares, experts = routing.shares.view(2, 12, 8), routing.experts.view(2, 12, 3)
    counts = sequence_counts(experts, 8)
    assert_close(counts.sum(dim=0), routing.counts, rtol=0)
    parts = range(0, 12, 4)
    whole = balance_loss(shares, counts, 3, 12)
    expected = [
        8 / (3 * 12) * sum((sequence == e).sum() * share[:, e].mean() for e in range(8))
        for sequence, share in zip(experts, shares, strict=True)
    ]
    assert_close(whole, torch.stack(expected), rtol=OPERATOR_RTOL)
    added = sum(balance_loss(shares[:, at : at + 4], counts, 3, 12) for at in parts)
    assert_close(added, whole, rtol=OPERATOR_RTOL)
    whole = z_loss(logits, 12)
    assert_close(whole, logits.exp().sum(-1).log().square().mean(1), rtol=OPERATOR_RTOL)
    assert_close(sum(z_loss(logits[:, at : at + 4], 12) for at in parts), whole, rtol=OPERATOR_RTOL)


@pytest.mark.parametrize("weights", [0.25, torch.tensor([0.5, 2.0], dtype=torch.float64)])
@pytest.mark.parametrize("viewed", [False, True])
def test_a_loss_trains_through_the_output_it_is_attached_to(weights: float | Tensor, viewed: bool) -> None:
    values = drawn(2, 3).requires_grad_()

    def output_and_loss() -> tuple[Tensor, Tensor]:
        output = values * 3
        return output.view(6) if viewed else output, values.square().sum(dim=1)

    output, loss = output_and_loss()
    attached = with_loss(output, loss, weights)
    assert not attached._is_view()
    grad = drawn(2, 3, seed=9).view_as(attached)
    (gradient,) = torch.autograd.grad(attached, values, grad)
    output, loss = output_and_loss()
    (expected,) = torch.autograd.grad((output * grad).sum() + (loss * weights).sum(), values)
    assert_close(gradient, expected, rtol=OPERATOR_RTOL)


def test_without_gradients_the_output_is_as_it_was() -> None:
    output = drawn(2, 3)
    with torch.no_grad():
        assert with_loss(output, drawn(2), 1.0) is output
