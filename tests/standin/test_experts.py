"""Experts on an accelerator: one product for all of them, and one wait of the host."""

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.activations import swiglu
from megalite.ops.adamw import add_weight_gradient_
from megalite.ops.expert_products import with_expert_biases
from megalite.ops.router import route
from megalite.parallel.device import local_device
from megalite.parallel.experts import through_experts
from megalite.parallel.gradient_sums import BY_AUTOGRAD, WeightGradients
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.experts import ExpertShape
from tests.support.mixtures import expert_mlp
from tests.support.parity import CHUNKED_RTOL, assert_close
from tests.support.standin import Syncs, count_syncs

HIDDEN, WIDTH, EXPERTS = 16, 24, 4
COUNTS = (5, 0, 9, 2)
IN_PLACE = WeightGradients(accumulate=add_weight_gradient_)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights(device: str) -> list[Tensor]:
    shapes = ((EXPERTS * 2 * WIDTH, HIDDEN), (EXPERTS * HIDDEN, WIDTH))
    made = [drawn(*shape, seed=seed).div(3).to(device) for seed, shape in enumerate(shapes)]
    for weight in made:
        weight.requires_grad_().grad_dtype = torch.float32
    return made


def trained(device: str, counts: tuple[int, ...], gradients: WeightGradients) -> tuple[list[Tensor], Syncs]:
    """Return output and gradients of two micro batches, and the waits of the host."""
    rows, own = drawn(sum(counts), HIDDEN, seed=5).to(device).requires_grad_(), weights(device)
    grad = drawn(sum(counts), HIDDEN, seed=6).to(device)
    with count_syncs() as syncs:
        for _ in range(2):
            output = expert_mlp(rows, counts, *own, swiglu, gradients)
            output.backward(grad)
    return [tensor.detach() for tensor in (output, rows.grad, *(weight.grad for weight in own))], syncs


def compare_on_device(in_place: bool) -> None:
    """Compare one grouped product for all experts with a product for each."""
    gradients = IN_PLACE if in_place else BY_AUTOGRAD
    calls: list[Callable[..., Tensor]] = []
    grouped = F.grouped_mm

    def counted(*inputs: Tensor, **settings: Tensor) -> Tensor:
        calls.append(grouped)
        return grouped(*inputs, **settings)

    for counts in (COUNTS, (0, 0, 0, 0)):
        calls.clear()
        with mock.patch.object(F, "grouped_mm", counted):
            on_device, syncs = trained("standin", counts, gradients)
        assert len(calls) == (12 if any(counts) else 0)  # two products and their gradients, twice
        # torch's product for a CPU reads where its groups end.
        assert syncs.total == len(calls), syncs
        on_cpu, _ = trained("cpu", counts, gradients)
        for ours, expected in zip(on_device, on_cpu, strict=True):
            assert_close(ours.cpu(), expected, rtol=CHUNKED_RTOL[torch.bfloat16])


def compare_biases_on_device() -> None:
    """Compare biases that are looked up for all rows at once with those of one expert after another."""
    results: list[list[Tensor]] = []
    for device in ("standin", "cpu"):
        rows = drawn(sum(COUNTS), HIDDEN, seed=3).to(device)
        bias = drawn(EXPERTS * HIDDEN, seed=4).to(device).requires_grad_()
        grad = drawn(sum(COUNTS), HIDDEN, seed=6).to(device)
        looked_up: list[int] = []
        with mock.patch.object(torch, "searchsorted", _noting(torch.searchsorted, looked_up)):
            biased = with_expert_biases(rows, bias, COUNTS)
        assert len(looked_up) == (device == "standin")
        biased.backward(grad)
        assert bias.grad is not None
        results.append([biased.detach().cpu(), bias.grad.cpu()])
    assert torch.equal(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1], rtol=CHUNKED_RTOL[torch.bfloat16])


def _noting(function: Callable[..., Tensor], calls: list[int]) -> Callable[..., Tensor]:
    def noted(*inputs: Tensor, **settings: bool) -> Tensor:
        calls.append(len(inputs))
        return function(*inputs, **settings)

    return noted


def waits_of_the_host() -> list[int]:
    """Return how often the host waits in a forward and backward through experts, line by line."""
    size = dist.get_world_size()
    mesh = ParallelMesh.over_world(Layout(data=size), local_device(dist.get_rank(), size))
    own = slice(mesh.batch.rank * 2, mesh.batch.rank * 2 + EXPERTS // mesh.batch.size)
    gate_up, down = (
        # float32: torch's grouped product for a CPU would wait.
        weight.detach().float().view(EXPERTS, -1, weight.shape[1])[own].flatten(0, 1).requires_grad_()
        for weight in weights("standin")
    )
    tokens = drawn(10, HIDDEN, seed=7).float().to("standin").requires_grad_()
    logits = drawn(10, EXPERTS, seed=8 + mesh.batch.rank).float().to("standin")
    compute = partial(_experts, gate_up=gate_up, down=down)
    routing = route(logits, ExpertShape(EXPERTS, 2, WIDTH))
    with count_syncs() as syncs:
        through_experts(tokens, routing, mesh.batch, compute).sum().backward()
    return [*syncs.lines.values()]


def _experts(rows: Tensor, counts: tuple[int, ...], gate_up: Tensor, down: Tensor) -> Tensor:
    return expert_mlp(rows, counts, gate_up, down, swiglu)


@pytest.mark.parametrize("in_place", [False, True])
def test_one_product_for_all_experts_is_a_product_for_each(devices, in_place: bool) -> None:
    devices.run(compare_on_device, in_place=in_place)


def test_biases_of_all_experts_are_those_of_each(devices) -> None:
    devices.run(compare_biases_on_device)


@pytest.mark.parametrize("size", [1, 2])
def test_the_host_waits_once(devices, size: int) -> None:
    assert devices.run(waits_of_the_host, world_size=size) == [[1]] * size
