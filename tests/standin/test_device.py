"""The stand-in accelerator itself: the CPU's numbers in memory of its own, and what a GPU refuses is refused."""

import ctypes
import os
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megalite.ops import extension

CHECKS: list[Callable[[], None]] = []
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Runs in a worker that has the device."""
    CHECKS.append(function)
    return function


@pytest.mark.parametrize("function", CHECKS, ids=lambda function: function.__name__)
def test_the_device(devices, function):
    devices.run(function)


def test_the_others_workers_have_no_accelerator(ranks):
    assert ranks.run(torch.accelerator.is_available) == [False]


def refused(call: Callable[[], object], message: str = "same device") -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        call()


@check
def torch_knows_it() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("standin")
    assert torch.accelerator.device_count() == 8
    torch.accelerator.set_device_index(3)
    assert torch.empty(2, device="standin").device == torch.device("standin:3")
    with torch.accelerator.device_index(5):
        assert torch.zeros(2, device="standin").device.index == 5
    assert torch.accelerator.current_device_index() == 3
    assert torch.distributed.get_default_backend_for_device("standin") == "standin"
    refused(lambda: torch.empty(2, device="standin:9"), "invalid device ordinal 9")


@check
def operators_refuse_tensors_of_two_devices() -> None:
    ours, theirs, next_to_us = (
        torch.ones(3, 3).to("standin"),
        torch.ones(3, 3),
        torch.ones(3, 3).to("standin:1"),
    )
    ids = torch.tensor([0, 2])
    for other in (theirs, next_to_us):
        refused(lambda other=other: ours + other)
        refused(lambda other=other: other @ ours)
        refused(lambda other=other: other.add_(ours))
        refused(lambda other=other: torch.cat([ours, other]))
        refused(lambda other=other: torch._foreach_add_([ours, ours], [ours, other]))
        refused(lambda other=other: torch.nn.functional.linear(ours, ours, other[0]))
        refused(lambda other=other: torch.add(ours, ours, out=other))
        refused(lambda other=other: torch.where(ours > 0, ours, other))
    refused(lambda: torch.nn.functional.embedding(ids, ours))
    refused(lambda: ours.index_select(0, ids))
    refused(lambda: ours.gather(0, torch.zeros(1, 3, dtype=torch.long)))
    refused(lambda: theirs[ids.to("standin")])
    refused(lambda: torch.stack([ours.sum(), torch.tensor(1.0)]))
    refused(lambda: ours.numpy(), "numpy")


@check
def what_cuda_takes_of_the_cpu_is_taken() -> None:
    ours, number = torch.arange(9.0).view(3, 3).to("standin"), torch.tensor(2.0)
    assert torch.equal((ours * number).cpu(), torch.arange(9.0).view(3, 3) * 2)
    assert torch.equal(ours[torch.tensor([0, 2])].cpu(), torch.arange(9.0).view(3, 3)[[0, 2]])
    ours[torch.tensor([1])] = number
    assert ours[1].tolist() == [2.0, 2.0, 2.0]
    assert torch.where(ours > 2, ours, number).min().item() == 2
    assert ours.masked_fill(ours > 2, number).max().item() == 2


@check
def the_host_cannot_read_the_memory() -> None:
    address = torch.ones(4, device="standin").data_ptr()
    child = os.fork()
    if child == 0:
        ctypes.c_float.from_address(address).value  # noqa: B018
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 11


@check
def memory_is_counted_and_what_is_freed_is_overwritten() -> None:
    free = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    one = torch.ones(1000, device="standin")
    assert torch.isnan(torch.empty(1000, device="standin")).all()
    assert torch.accelerator.memory_allocated() == free + 4000
    view, address = one[10:].view(-1), one.data_ptr()
    del one
    assert torch.accelerator.memory_allocated() == free + 4000
    del view
    assert torch.accelerator.memory_allocated() == free
    assert free + 8000 <= torch.accelerator.max_memory_allocated() < free + 12000
    again = torch.empty(1000, device="standin")
    assert again.data_ptr() == address
    assert torch.isnan(again).all()


@check
def views_and_operators_in_place_share_memory() -> None:
    def change(x: Tensor) -> list[Tensor]:
        part = x[1:, ::2]
        part.mul_(2).add_(part.clone(), alpha=3)
        x.t()[0].copy_(torch.arange(4.0, device=x.device))
        left, right = x.split([2, 3], dim=1)
        torch.add(left, 1, out=left)
        right.unfold(1, 2, 1).select(-1, 0).zero_()
        torch._foreach_mul_([left, right], 0.5)
        x.diagonal().fill_(7)
        x.view(-1)[3:5] = 1
        flat = x.reshape(-1).as_strided((3,), (4,), 1)
        return [x, part, left, right, flat, x.expand(2, 4, 5), x.view(torch.int32)]

    start = torch.randn(4, 5)
    device, cpu = change(start.to("standin")), change(start.clone())
    for one, other in zip(device, cpu, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one.cpu(), other)
    base = torch.zeros(6).to("standin")
    assert base.view(2, 3).t().data_ptr() == base.data_ptr()


@check
def outputs_are_resized() -> None:
    device, cpu = torch.empty(0, device="standin"), torch.empty(0)
    for out in (device, cpu):
        torch.arange(5, out=out)
        torch.cat([out, out], out=out.resize_(0).new_empty(0))
    assert torch.equal(device.cpu(), cpu)
    kept = torch.arange(6.0).to("standin")
    kept.resize_(9)
    assert kept[:6].tolist() == [0, 1, 2, 3, 4, 5]
    kept.untyped_storage().resize_(0)
    assert kept.untyped_storage().nbytes() == 0


def _random_graph(start: list[Tensor], seed: int) -> Tensor:
    draw = random.Random(seed)
    values = list(start)
    unary: list[Callable[[Tensor], Tensor]] = [
        torch.exp,
        torch.sin,
        torch.nn.functional.silu,
        torch.nn.functional.gelu,
        partial(torch.softmax, dim=-1),
        partial(torch.nn.functional.rms_norm, normalized_shape=(6,)),
        partial(torch.nn.functional.layer_norm, normalized_shape=(6,)),
        lambda x: x.t().contiguous().t(),
        lambda x: x.cumsum(0) / 6,
        lambda x: x[torch.arange(5, -1, -1, device=x.device)],
        lambda x: x.index_select(0, torch.tensor([0, 0, 1, 2, 3, 5]).to(x.device)),
        lambda x: torch.cat([y * 2 for y in x.chunk(3)]),
        lambda x: torch.where(x > 0, x, x * 0.1),
        lambda x: x.clone().index_add_(0, torch.tensor([1, 1]).to(x.device), x[:2]),
        lambda x: x.clone().mul_(x.detach().std()),
    ]
    binary = [torch.add, torch.mul, torch.matmul, torch.maximum, lambda x, y: torch.stack([x, y]).mean(0)]
    for _ in range(12):
        one, other = draw.choice(values), draw.choice(values)
        made = draw.choice(unary)(one) if draw.random() < 0.6 else draw.choice(binary)(one, other)
        values.append(made / (1 + made.detach().abs().max()))
    return torch.stack(values).float().square().sum()


@check
def random_graphs_have_the_gradients_of_the_cpu() -> None:
    for seed in range(40):
        dtype = DTYPES[seed % len(DTYPES)]
        start = [torch.randn(6, 6, generator=torch.Generator().manual_seed(seed + part)) for part in range(3)]
        outcomes = []
        for device in ("cpu", "standin"):
            leaves = [value.to(dtype).to(device).requires_grad_() for value in start]
            result = _random_graph(leaves, seed)
            gradients = torch.autograd.grad(result, leaves, allow_unused=True)
            outcomes.append([result, *(each for each in gradients if each is not None)])
        for one, other in zip(*outcomes, strict=True):
            assert torch.equal(one.cpu(), other.cpu()), f"seed {seed}"


@check
def attention_and_optimizers_have_the_numbers_of_the_cpu() -> None:
    def step(device: str) -> list[Tensor]:
        made = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(2, 4, 32, 16, generator=made).to(device) for _ in range(3))
        weight = torch.randn(16, 16, generator=made).to(device).requires_grad_()
        optimizer = torch.optim.AdamW([weight], fused=True)
        for causal in (True, False):
            attend = torch.nn.functional.scaled_dot_product_attention
            attend(query @ weight, key, value, is_causal=causal).square().sum().backward()
            optimizer.step()
        norm = torch.nn.utils.clip_grad_norm_([weight], 1.0, foreach=True)
        solved = torch.linalg.solve(
            weight.detach().double(), torch.eye(16, dtype=torch.float64, device=device)
        )
        return [weight.detach(), norm, solved]

    for one, other in zip(step("standin"), step("cpu"), strict=True):
        assert torch.equal(one.cpu(), other)


@check
def random_numbers_have_a_stream_a_device() -> None:
    torch.manual_seed(5)
    first, here = torch.rand(3, device="standin:0"), torch.rand(3)
    assert torch.equal(first.cpu(), here)
    assert torch.equal(torch.rand(3, device="standin:1").cpu(), here)
    state = torch.standin.get_rng_state()  # type: ignore[attr-defined]
    drawn = torch.nn.functional.dropout(torch.ones(100, device="standin"), 0.5)
    torch.standin.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(drawn, torch.nn.functional.dropout(torch.ones(100, device="standin"), 0.5))
    own = torch.Generator("standin").manual_seed(3)
    other = torch.Generator().manual_seed(3)
    assert torch.equal(
        torch.randperm(9, generator=own, device="standin").cpu(), torch.randperm(9, generator=other)
    )


@check
def tensors_are_saved_and_loaded() -> None:
    import io

    file = io.BytesIO()
    torch.save(torch.arange(3.0).to("standin:2"), file)
    file.seek(0)
    there = torch.load(file)
    assert there.device == torch.device("standin:2")
    file.seek(0)
    assert torch.load(file, map_location="cpu").tolist() == there.tolist() == [0, 1, 2]


@check
def compiled_operators_run_on_it() -> None:
    assert extension.load() == ""
    from megalite.ops import norms

    rows, weight = torch.randn(7, 48), torch.randn(48)
    results = []
    for device in ("cpu", "standin"):
        x, scale = (value.clone().to(device).requires_grad_() for value in (rows, weight))
        out = norms.compiled_norm(x, scale, None, 1e-6)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, scale.grad])
    for cpu, device in zip(*results, strict=True):
        assert torch.equal(cpu, device.cpu())
    with pytest.raises(RuntimeError, match="same device"):
        norms.compiled_norm(rows.to("standin"), weight, None, 1e-6)
