"""The loss over a vocabulary cut unevenly, against torch's over the whole: random cases, and what it communicates."""

import random

import pytest
import torch

from megalite.parallel.cross_entropy import LossTerms, VocabularyShard, vocab_parallel_cross_entropy
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.stages import balanced_split
from tests.distributed.test_split_backward import Counter
from tests.support.parity import assert_close
from tests.unit.parallel.test_cross_entropy import tokens, torchs


def random_losses_on_rank(tp: int, cases: list[tuple[int, int, float, float, float]]) -> list[list[str]]:
    """Compare each case with torch; the collectives that each took, backward included."""
    mesh = ParallelMesh.over_world(Layout(tensor=tp))
    collectives = []
    for seed, vocabulary, spread, label_smoothing, z_loss in cases:
        logits, labels, loss_mask = tokens(3, 7, vocabulary, spread, seed)
        terms = LossTerms(vocabulary, label_smoothing, z_loss)
        rows = balanced_split(vocabulary, tp)[mesh.tp.rank]
        leaf = logits[..., rows.start : rows.stop].clone().requires_grad_()
        with Counter() as counter:
            shard = VocabularyShard(rows, mesh.tp)
            losses = vocab_parallel_cross_entropy(leaf, labels, loss_mask, shard, terms)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        collectives.append(counter.collectives)
        expected_losses, expected_gradient = torchs(logits, labels, loss_mask, terms)
        what = f"of seed {seed}, {terms}"
        assert_close(1 + losses, 1 + expected_losses, what=f"token losses {what}")
        expected = expected_gradient[..., rows.start : rows.stop]
        assert_close(1 + gradient, 1 + expected, what=f"gradient of {rows} {what}")
    return collectives


@pytest.mark.parametrize("tp", [2, 4])
def test_random_losses_are_torchs(ranks, tp):
    draw = random.Random()  # new cases each time; a failure names its own
    cases = [
        (
            draw.randrange(2**32),
            draw.choice([5, 37, 101, 258]),
            draw.choice([1.0, 30.0]),
            draw.choice([0.0, 0.1, draw.random()]),
            draw.choice([0.0, 1e-4, draw.random()]),
        )
        for _ in range(40)
    ]
    # A few numbers a token, whatever the terms.
    collectives = [["_allgather_base_"]] * len(cases)
    assert ranks.run(random_losses_on_rank, world_size=tp, tp=tp, cases=cases) == [collectives] * tp
