"""The load of experts over steps: figures, biases that skipped steps leave, and experts that die."""

from dataclasses import fields, replace

import torch

from megalite.config.sections.training_section import ComputeSettings
from megalite.model.moe import Mixture
from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.ops.router import RealTokens
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.experts import ExpertShape, MixtureShape
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from megalite.train.step.router_load import DEAD_STEPS, RouterLoad
from tests.support.parity import OPERATOR_RTOL, about, assert_close
from tests.support.tiny import tiny_shape

DENSE = {field.name: getattr(tiny_shape(layers=2), field.name) for field in fields(ModelShape)}
EXPERTS = ExpertShape(4, 1, 6, correction_bias=True)


def _replica(shape: ModelShape):
    return build_replica(shape, ParallelMesh.single(), pipeline_split(2), ModelOptions(), seed=1)


def _gates(replica):
    return [module.gate for module in replica.stage.modules() if isinstance(module, Mixture)]


def test_a_dense_model_has_no_load() -> None:
    load = RouterLoad(_replica(tiny_shape(layers=2)), 0.1)
    assert load.take_share().tolist() == []
    assert load.stepped(load.take_share(), 8, skipped=False) == {}
    assert load.newly_dead() == []


def test_counts_become_figures_and_move_the_biases_once() -> None:
    replica = _replica(MixtureShape(**DENSE, experts=EXPERTS))
    load, gates = RouterLoad(replica, 0.5), _gates(replica)
    for gate, counts in zip(gates, ([4, 2, 1, 1], [2, 2, 2, 2]), strict=True):
        gate.counts.copy_(torch.tensor(counts))
        gate.losses.fill_(3.0)
    totals = load.take_share()
    assert totals.tolist() == [4, 2, 1, 1, 2, 2, 2, 2, 6]
    assert not any(gate.counts.any() or gate.losses for gate in gates), "they count anew"
    figures = load.stepped(totals, 8, skipped=True)
    assert not any(gate.e_score_correction_bias.any() for gate in gates), "the step was skipped"
    entropy = (0.5 * 1 + 0.25 * 2 + 2 * 0.125 * 3) / 2  # in bits, of two
    assert figures == about(
        {"expert_load": 2.0, "router_entropy": entropy, "idle_experts": 0.0, "router_loss": 0.75}
    )
    assert load.of_layers == about({"expert_load/layers.0": 2.0, "expert_load/layers.1": 1.0})
    load.stepped(totals, 8, skipped=False)
    assert [gate.e_score_correction_bias.tolist() for gate in gates] == [[-0.5, 0, 0.5, 0.5], [0, 0, 0, 0]]


def test_an_expert_without_tokens_is_named_once_and_may_come_back() -> None:
    replica = _replica(MixtureShape(**DENSE, experts=replace(EXPERTS, first_k_dense_replace=1)))
    load, named = RouterLoad(replica, 0.0), []
    without, with_all = torch.tensor([3.0, 0, 2, 3, 0]), torch.tensor([3.0, 1, 2, 2, 0])
    for step in range(1, 3 * DEAD_STEPS + 2):
        if step % 30 == 0:
            # As a run that goes on from a checkpoint.
            before, load = load, RouterLoad(replica, 0.0)
            load.go_on(before.idle_experts)
        load.stepped(with_all if step == 2 * DEAD_STEPS else without, 8, skipped=False)
        named += [(step, dead) for dead in load.newly_dead()]
    assert named == [(DEAD_STEPS, "expert 1 of layer 1"), (3 * DEAD_STEPS, "expert 1 of layer 1")]


def test_padding_counts_nowhere() -> None:
    """Losses, their gradient and counts are those of the rows without their padding, each alone."""
    training = ComputeSettings(router_balance=0.3, router_z=0.2)
    shape = MixtureShape(**DENSE, experts=replace(EXPERTS, num_experts_per_tok=2))
    split, options = pipeline_split(2), ModelOptions(dtype=torch.float64, training=training)
    gate = _gates(build_replica(shape, ParallelMesh.single(), split, options, seed=1))[0]
    hidden = torch.randn(
        3, 7, shape.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    lengths = torch.tensor([7, 4, 1])
    real = RealTokens(torch.arange(7) < lengths.unsqueeze(1), lengths)

    def measured(rows: list[tuple[torch.Tensor, RealTokens | None]]) -> list[torch.Tensor]:
        gate.zero_grad()
        gate.counts.zero_()
        gate.losses.zero_()
        for tokens, mask in rows:
            (gate(tokens, 1.5, mask).weights * 0).sum().backward()
        return [gate.counts.clone(), gate.losses.clone(), gate.weight.grad.clone()]

    alone = measured(
        [(row[None, :length], None) for row, length in zip(hidden, lengths.tolist(), strict=True)]
    )
    assert alone[0].sum() == 2 * lengths.sum() and alone[2].any()
    for found, expected in zip(measured([(hidden, real)]), alone, strict=True):
        assert_close(found, expected, rtol=OPERATOR_RTOL)
    assert not torch.equal(measured([(hidden, None)])[0], alone[0])
