"""Parallel layers and the loss against their dense selves: outputs and every gradient, over all ranks."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from megalite.parallel.collectives import column_input, gather_last_dim
from megalite.parallel.cross_entropy import LossTerms, VocabularyShard, vocab_parallel_cross_entropy
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.stages import balanced_split
from tests.support.parity import about, assert_close

HIDDEN, FEATURES, VOCABULARY = 12, 20, 37


def _values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass
class Seen:
    """One rank's output and gradients."""

    output: torch.Tensor
    input_grad: torch.Tensor
    weight_grads: list[torch.Tensor]


def mlp_on_rank(tp: int, sequence_parallel: bool) -> Seen:
    mesh = ParallelMesh.over_world(Layout(tensor=tp), sequence_parallel=sequence_parallel)
    up = ColumnParallelLinear(HIDDEN, mesh.local(FEATURES), mesh=mesh, dtype=torch.float64)
    down = RowParallelLinear(mesh.local(FEATURES), HIDDEN, mesh=mesh, dtype=torch.float64)
    held = balanced_split(FEATURES, tp)[mesh.tp.rank]
    up.weight.data.copy_(_values(FEATURES, HIDDEN, seed=1)[held.start : held.stop])
    down.weight.data.copy_(_values(HIDDEN, FEATURES, seed=2)[:, held.start : held.stop])
    here = mesh.sequence_range(8)
    hidden_states = _values(3, 8, HIDDEN, seed=3)[:, here.start : here.stop].requires_grad_()
    output = down(torch.tanh(up(hidden_states)))
    (output * _values(3, 8, HIDDEN, seed=4)[:, here.start : here.stop]).sum().backward()
    return Seen(output.detach(), hidden_states.grad, [up.weight.grad, down.weight.grad])


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
def test_column_then_row_equals_the_dense_mlp(ranks, tp, sequence_parallel):
    hidden_states = _values(3, 8, HIDDEN, seed=3).requires_grad_()
    up, down = (
        _values(FEATURES, HIDDEN, seed=1).requires_grad_(),
        _values(HIDDEN, FEATURES, seed=2).requires_grad_(),
    )
    output = F.linear(torch.tanh(F.linear(hidden_states, up)), down)
    (output * _values(3, 8, HIDDEN, seed=4)).sum().backward()

    results = ranks.run(mlp_on_rank, world_size=tp, tp=tp, sequence_parallel=sequence_parallel)
    pieces = tp if sequence_parallel else 1
    for rank, seen in enumerate(results):
        assert_close(seen.output, output.chunk(pieces, 1)[rank % pieces], what="output")
        assert_close(
            seen.input_grad, hidden_states.grad.chunk(pieces, 1)[rank % pieces], what="input gradient"
        )
    assert_close(torch.cat([seen.weight_grads[0] for seen in results]), up.grad, what="column weight")
    assert_close(torch.cat([seen.weight_grads[1] for seen in results], dim=1), down.grad, what="row weight")


def embedding_and_loss_on_rank(tp: int, sequence_parallel: bool, terms: LossTerms) -> Seen:
    """Token losses from an embedding and a head whose vocabularies are cut unevenly."""
    mesh = ParallelMesh.over_world(Layout(tensor=tp), sequence_parallel=sequence_parallel)
    embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, mesh=mesh, dtype=torch.float64)
    rows = embedding.rows
    embedding.weight.data.copy_(_values(VOCABULARY, HIDDEN, seed=1)[rows.start : rows.stop])
    head = _values(VOCABULARY, HIDDEN, seed=2)[rows.start : rows.stop].clone().requires_grad_()
    input_ids, labels, loss_mask = _tokens()
    hidden_states = embedding(input_ids)
    hidden_states.retain_grad()
    logits = F.linear(column_input(hidden_states, mesh), head)
    sizes = tuple(len(part) for part in balanced_split(VOCABULARY, tp))
    full_logits = gather_last_dim(logits.detach(), sizes, mesh.tp).clone()
    losses = vocab_parallel_cross_entropy(logits, labels, loss_mask, VocabularyShard(rows, mesh.tp), terms)
    losses.sum().backward()
    seen = Seen(losses.detach(), hidden_states.grad, [embedding.weight.grad, head.grad])
    seen.weight_grads.append(full_logits)
    return seen


def _tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    input_ids = torch.randint(VOCABULARY, (4, 8), generator=generator)
    labels = torch.randint(VOCABULARY, (4, 8), generator=generator)
    labels[0, :3] = -100
    loss_mask = torch.rand(4, 8, generator=generator, dtype=torch.float64)
    loss_mask[1, 2:4] = 0
    return input_ids, labels, loss_mask


@pytest.mark.parametrize(
    "terms",
    [
        LossTerms(VOCABULARY),
        LossTerms(VOCABULARY, label_smoothing=0.1),
        LossTerms(VOCABULARY, z_loss=0.01),
        LossTerms(VOCABULARY, label_smoothing=0.3, z_loss=0.1),
    ],
    ids=["plain", "smoothed", "z-loss", "both"],
)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
def test_embedding_and_cross_entropy_equal_the_dense_ones(ranks, tp, sequence_parallel, terms):
    input_ids, labels, loss_mask = _tokens()
    table = _values(VOCABULARY, HIDDEN, seed=1).requires_grad_()
    head = _values(VOCABULARY, HIDDEN, seed=2).requires_grad_()
    hidden_states = F.embedding(input_ids, table)
    hidden_states.retain_grad()
    logits = F.linear(hidden_states, head)
    losses = F.cross_entropy(
        logits.flatten(0, 1),
        labels.flatten(),
        reduction="none",
        ignore_index=-100,
        label_smoothing=terms.label_smoothing,
    )
    squared = logits.flatten(0, 1).logsumexp(dim=-1).square()
    losses = losses + terms.z_loss * squared * (labels.flatten() != -100)
    (losses.view(4, 8) * loss_mask).sum().backward()

    results = ranks.run(
        embedding_and_loss_on_rank, world_size=tp, tp=tp, sequence_parallel=sequence_parallel, terms=terms
    )
    pieces = tp if sequence_parallel else 1
    for rank, seen in enumerate(results):
        here = hidden_states.grad.chunk(pieces, 1)[rank % pieces]
        assert_close(seen.output, losses.view(4, 8) * loss_mask, what="token losses")
        assert_close(seen.input_grad, here, what="hidden gradient")
        assert_close(seen.weight_grads[2], logits, what="gathered logits")
    assert_close(torch.cat([seen.weight_grads[0] for seen in results]), table.grad, what="embedding")
    assert_close(torch.cat([seen.weight_grads[1] for seen in results]), head.grad, what="head")


def test_a_masked_position_may_hold_infinite_logits(ranks):
    [(loss, finite)] = ranks.run(masked_infinity_on_rank, world_size=1)
    assert loss == about(torch.log(torch.tensor(5.0)).item())
    assert finite


def masked_infinity_on_rank() -> tuple[float, bool]:
    logits = torch.zeros(1, 2, 5, dtype=torch.float64)
    logits[0, 1, 3] = 1e308
    logits.requires_grad_()
    mesh = ParallelMesh.single()
    labels, weights = torch.tensor([[1, 2]]), torch.tensor([[1.0, 0.0]])
    shard = VocabularyShard(range(5), mesh.tp)
    losses = vocab_parallel_cross_entropy(logits, labels, weights, shard, LossTerms(5))
    losses.sum().backward()
    return losses.sum().item(), bool(torch.isfinite(logits.grad).all())
