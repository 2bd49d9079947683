"""A recomputed region: what it keeps, when it runs again, and what it refuses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.model import recompute
from megalite.model.options import ModelOptions, Recompute
from megalite.model.recompute import recomputed
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.stages import pipeline_split
from tests.support.tiny import tiny_batch, tiny_shape

WEIGHT = torch.randn(5, 5, dtype=torch.float64)


class Counted:
    """x -> tanh(x W)^2 W, which counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.weight = WEIGHT.clone().requires_grad_()

    def __call__(self, values: Tensor) -> Tensor:
        self.calls += 1
        return (values @ self.weight).tanh().square() @ self.weight


def gradients(run: Callable[[Counted, Tensor], Tensor]) -> tuple[Counted, tuple[Tensor, ...]]:
    function = Counted()
    values = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5).requires_grad_()
    run(function, values).sum().backward()
    return function, (values.grad, function.weight.grad)


def test_gradients_are_the_same_to_the_bit_and_it_runs_once_more():
    _, expected = gradients(lambda function, values: function(values))
    function, found = gradients(recomputed)
    assert function.calls == 2
    assert all(map(torch.equal, found, expected))


def test_passes_for_inputs_and_weights_share_one_recompute():
    function, values = Counted(), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    loss = recomputed(function, values).sum()
    found = torch.autograd.grad(loss, values, retain_graph=True) + torch.autograd.grad(loss, function.weight)
    expected = torch.autograd.grad(function(values).sum(), (values, function.weight))
    assert function.calls == 3  # the last is the line above
    assert all(map(torch.equal, found, expected))


def test_forward_keeps_nothing_and_backward_frees_as_it_goes():
    function, values = Counted(), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        loss = recomputed(function, values)
    assert not kept
    regions = []
    run_again = recompute._Region.run_again
    recompute._Region.run_again = lambda region: regions.append(region) or run_again(region)
    try:
        loss.sum().backward()
    finally:
        recompute._Region.run_again = run_again
    [region] = regions
    assert all(omitted() is None for omitted in region._omitted)


def test_without_gradients_it_is_a_plain_call():
    function = Counted()
    with torch.no_grad():
        assert not recomputed(function, torch.randn(3, 5, dtype=torch.float64)).requires_grad
    assert function.calls == 1


def test_an_input_overwritten_meanwhile_is_refused():
    leaf = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    values = leaf * 1
    loss = recomputed(Counted(), values).sum()
    values.detach().add_(1)
    with pytest.raises(AssertionError, match="an input of a recomputed region was overwritten"):
        loss.backward()


def test_a_saved_tensor_overwritten_within_the_region_is_refused():
    def overwriting(values: Tensor) -> Tensor:
        activated = values.tanh()  # saves its output
        squared = activated.square()
        activated.detach().zero_()
        return squared.exp()

    loss = recomputed(overwriting, torch.randn(3, requires_grad=True)).sum()
    with pytest.raises(AssertionError, match="a recomputed tensor was overwritten"):
        loss.backward()


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (lambda values: values.tanh(), "fewer than forward"),
        (
            lambda values: values.repeat(2).tanh().square(),
            "recompute gave torch.float32 .6,., forward torch.float32 .3,.",
        ),
    ],
)
def test_a_function_that_computes_something_else_is_refused(later, said):
    functions = iter([lambda values: values.tanh().square(), later])
    loss = recomputed(lambda values: next(functions)(values), torch.randn(3, requires_grad=True)).sum()
    with pytest.raises(AssertionError, match=said):
        loss.backward()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Recompute("full"), "ffffff"),
        (Recompute("selective", layers=2), "ss----"),
        (Recompute("full", layers=9), "ffffff"),
        (Recompute("full", ratio=0.5), "-f-f-f"),
        (Recompute("full", ratio=0.3), "--f--f"),
        (Recompute("full", ratio=1.0), "ffffff"),
        (Recompute("full", ratio=0.7), "-fffff"),
        (Recompute(), "------"),
    ],
)
def test_which_layers_of_a_chunk_are_recomputed(how, expected):
    assert (
        "".join({"none": "-"}.get(mode := how.of_layer(place, 6), mode[0]) for place in range(6)) == expected
    )


def _activations(recompute: Recompute) -> int:
    """Bytes that the forward of one micro batch keeps, weights apart; inputs of regions are counted by hand."""
    shape = tiny_shape()
    stage = build_replica(
        shape, ParallelMesh.single(), pipeline_split(4), ModelOptions(recompute=recompute), seed=1
    ).stage
    own = {tensor.untyped_storage().data_ptr() for tensor in (*stage.parameters(), *stage.buffers())}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    batch = tiny_batch(shape, 2)
    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        stage.whole.decode(batch.input_ids, batch.position_ids)
    return sum(size for size, _ in kept.values())


def test_what_forward_keeps_shrinks_with_what_is_recomputed():
    sizes = [
        _activations(how)
        for how in (Recompute(), Recompute("selective"), Recompute("full", ratio=0.5), Recompute("full"))
    ]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    half, full, none = sizes[2], sizes[3], sizes[0]
    assert abs((none - half) - (half - full)) < 0.1 * none
