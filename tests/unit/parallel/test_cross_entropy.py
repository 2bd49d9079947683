"""The loss over one shard against torch's own; tests/distributed/test_layers.py has it over several."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite.parallel.cross_entropy import (
    IGNORE_INDEX,
    LossTerms,
    VocabularyShard,
    vocab_parallel_cross_entropy,
)
from megalite.parallel.mesh import ParallelMesh
from tests.support.parity import assert_close

BOTH = {"label_smoothing": 0.1, "z_loss": 0.01}


def ours(logits: Tensor, labels: Tensor, loss_mask: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Token losses and the gradient of their sum by the logits, which stay as they are."""
    given_logits = logits.clone().requires_grad_()
    shard = VocabularyShard(range(logits.shape[-1]), ParallelMesh.single().tp)
    losses = vocab_parallel_cross_entropy(given_logits, labels, loss_mask, shard, terms)
    (gradient,) = torch.autograd.grad(losses.sum(), given_logits)
    return losses.detach(), gradient


def torchs(logits: Tensor, labels: Tensor, loss_mask: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    plain = F.cross_entropy(
        leaf.flatten(0, 1),
        labels.flatten(),
        reduction="none",
        ignore_index=IGNORE_INDEX,
        label_smoothing=terms.label_smoothing,
    ).view(labels.shape)
    counted = loss_mask * (labels != IGNORE_INDEX)
    losses = (plain + terms.z_loss * leaf.logsumexp(dim=-1).square()) * counted
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


def tokens(sequences: int, length: int, vocabulary: int, spread: float, seed: int) -> tuple[Tensor, ...]:
    """Logits, labels with ignored ones among them, and weights with zeros among them, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sequences, length)
    logits = spread * torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocabulary, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.2] = IGNORE_INDEX
    loss_mask = 2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    loss_mask[torch.rand(shape, generator=generator) < 0.2] = 0
    return logits, labels, loss_mask


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40)),
    spread=st.sampled_from([0.0, 1.0, 100.0]),
    label_smoothing=st.one_of(st.just(0.0), st.floats(0, 1, exclude_max=True)),
    z_loss=st.one_of(st.just(0.0), st.floats(0, 10)),
    seed=st.integers(0, 2**32),
)
def test_losses_and_gradients_are_torchs(sizes, spread, label_smoothing, z_loss, seed):
    logits, labels, loss_mask = tokens(*sizes, spread, seed)
    terms = LossTerms(sizes[2], label_smoothing, z_loss)
    losses, gradient = ours(logits, labels, loss_mask, terms)
    expected_losses, expected_gradient = torchs(logits, labels, loss_mask, terms)
    # With one id, or all logits alike, what is zero by mathematics is rounding: measured beside 1.
    assert_close(1 + losses, 1 + expected_losses, what="token losses")
    assert_close(1 + gradient, 1 + expected_gradient, what="gradient")


@pytest.mark.parametrize("extras", [{}, BOTH], ids=["plain", "smoothed, z-loss"])
def test_the_gradient_is_written_over_the_logits(extras):
    logits, labels, loss_mask = tokens(2, 3, 11, 1.0, seed=0)
    logits.requires_grad_()
    shard = VocabularyShard(range(11), ParallelMesh.single().tp)
    losses = vocab_parallel_cross_entropy(logits, labels, loss_mask, shard, LossTerms(11, **extras))
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("extras", [{}, BOTH], ids=["plain", "smoothed, z-loss"])
@pytest.mark.parametrize("mask", ["weight 0", "ignored label"])
def test_a_masked_token_counts_nothing_whatever_its_logits(extras, mask):
    logits, labels, loss_mask = tokens(2, 4, 11, 1.0, seed=0)
    labels.clamp_(min=0)
    loss_mask.fill_(1)
    if mask == "weight 0":
        loss_mask[1, 2] = 0
    else:
        labels[1, 2] = IGNORE_INDEX
    overflowing = logits.clone()
    overflowing[1, 2, 3] = 1e200  # finite, its square is not
    terms = LossTerms(11, **extras)
    losses, gradient = ours(overflowing, labels, loss_mask, terms)
    expected_losses, expected_gradient = ours(logits, labels, loss_mask, terms)
    assert losses[1, 2] == 0 and not gradient[1, 2].any()
    assert_close(losses, expected_losses, rtol=0, what="token losses")
    assert_close(gradient, expected_gradient, rtol=0, what="gradient")
