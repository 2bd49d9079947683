"""Sums of gradients over copies without other ranks: when they start, and how much memory they hold meanwhile."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megalite.parallel import gradient_buckets
from megalite.parallel.gradient_buckets import GradientBuckets
from megalite.parallel.mesh import RankGroup

LAYERS = 9
PAIR = RankGroup(ranks=(0, 1), rank=0)


def trained(buckets: GradientBuckets, layers: nn.Sequential, inputs: Tensor) -> None:
    """Run the last forward and backward of a step, without `finish`."""
    with buckets.last_forward():
        # A tensor that no layer made has no gradient: the embedding's output has one.
        outputs = layers(inputs.requires_grad_() * 1)
    outputs.sum().backward()


@contextmanager
def sums_with_an_equal_rank() -> Iterator[list[int]]:
    """Double what is summed once it is waited for; yield the number of buffers in use at the start of each sum."""
    in_use: list[int] = []
    buffers: list[weakref.ref[Tensor]] = []

    def start(values: Tensor, _: RankGroup) -> Callable[[], Tensor]:
        buffers.append(weakref.ref(values))
        in_use.append(sum(buffer() is not None for buffer in buffers))
        return lambda: values.mul_(2)

    with mock.patch.object(gradient_buckets, "start_all_reduce", start):
        yield in_use


@pytest.mark.parametrize("early", [True, False])
def test_sums_in_another_type_hold_few_converted_copies(early):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))
    inputs = torch.randn(4, 8)
    copies = dict.fromkeys(layers.parameters(), PAIR)
    buckets = GradientBuckets({0: [*layers]}, copies, [], bucket_bytes=1, dtype=torch.bfloat16)
    layers(inputs).sum().backward()
    own = [each.grad for each in layers.parameters()]
    layers.zero_grad()
    with sums_with_an_equal_rank() as in_use, mock.patch("megalite.parallel.gradients.COLLECTIVE_BYTES", 1):
        if early:
            trained(buckets, layers, inputs)
            assert len(in_use) > LAYERS // 2
        else:
            layers(inputs).sum().backward()
        buckets.finish()
    assert len(in_use) == LAYERS
    assert 1 < max(in_use) <= LAYERS // 2
    for parameter, gradient in zip(layers.parameters(), own, strict=True):
        assert torch.equal(parameter.grad, (gradient.bfloat16() * 2).float())


def test_sums_in_place_wait_for_no_earlier_one():
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))
    buckets = GradientBuckets({0: [*layers]}, dict.fromkeys(layers.parameters(), PAIR), [], bucket_bytes=1)
    with sums_with_an_equal_rank() as in_use:
        trained(buckets, layers, torch.randn(4, 8))
        assert in_use == [*range(1, LAYERS + 1)]


def test_a_bucket_larger_than_the_model_starts_before_the_first_layer_s_gradients():
    """As with DeepSpeed's default of reduce_bucket_size, 5e8, which many files copy."""
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))
    copies = dict.fromkeys(layers.parameters(), PAIR)
    of_a_layer = layers[0].weight.nbytes
    with mock.patch.object(gradient_buckets, "COLLECTIVE_BYTES", 4 * of_a_layer):
        buckets = GradientBuckets({0: [*layers]}, copies, [], bucket_bytes=4 * 500_000_000)
    sums: list[tuple[int, bool]] = []

    def start(values: Tensor, _: RankGroup) -> Callable[[], Tensor]:
        sums.append((values.nbytes // of_a_layer, layers[0].weight.grad is None))
        return lambda: values

    with mock.patch.object(gradient_buckets, "start_all_reduce", start):
        trained(buckets, layers, torch.randn(4, 8))
    assert sums == [(4, True), (4, True), (1, False)]
