"""The process group of the stand-in: gloo's numbers, on tensors of the rank's own device alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.parallel.device import local_device
from tests.support.ranks import RankFailed, RankPool


def device() -> torch.device:
    return local_device(dist.get_rank(), dist.get_world_size())


def collectives() -> dict[str, list[float]]:
    """Each collective that training uses, on small numbers of this rank."""
    rank, size, here = dist.get_rank(), dist.get_world_size(), device()
    mine = torch.arange(4.0, device=here) + 10 * rank
    found: dict[str, torch.Tensor] = {
        "all_reduce": mine.clone(),
        "maximum": mine.clone(),
        "broadcast": mine.clone(),
    }
    dist.all_reduce(found["all_reduce"])
    dist.all_reduce(found["maximum"], op=dist.ReduceOp.MAX)
    dist.broadcast(found["broadcast"], src=1)
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    found["all_gather"] = torch.cat(parts)
    found["into_tensor"] = torch.empty(4 * size, device=here)
    work = dist.all_gather_single(found["into_tensor"], mine, async_op=True)
    work.wait()
    found["reduce_scatter"] = torch.empty(4 // size, device=here)
    dist.reduce_scatter_single(found["reduce_scatter"], mine)
    found["listed"] = torch.empty(4 // size, device=here)
    dist.reduce_scatter(found["listed"], list(mine.chunk(size)))
    found["reduce"] = mine.clone()
    dist.reduce(found["reduce"], dst=0)
    found["all_to_all"] = torch.empty(4, device=here)
    dist.all_to_all_single(found["all_to_all"], mine)
    found["scatter"] = torch.empty(2, device=here)
    dist.scatter(
        found["scatter"],
        [torch.full((2,), float(each), device=here) for each in range(size)] if rank == 0 else None,
    )
    found["bf16"] = mine.bfloat16()
    dist.all_reduce(found["bf16"])
    together = [mine.clone(), mine + 1]
    if here.type == "cpu":  # gloo has no such thing
        for tensor in together:
            dist.all_reduce(tensor)
    else:
        with dist._coalescing_manager(device=here, async_ops=True) as manager:
            for tensor in together:
                dist.all_reduce(tensor)
        manager.wait()
    found["together"] = torch.cat(together)
    found |= _messages(mine)
    dist.barrier()
    return {name: tensor.tolist() for name, tensor in found.items() if name != "reduce" or rank == 0}


def _messages(mine: torch.Tensor) -> dict[str, torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    batched, single = torch.zeros_like(mine), torch.zeros_like(mine)
    operations = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, batched, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if rank == 0:
        dist.send(mine, after)
        dist.recv(single, before)
    else:
        dist.recv(single, before)
        dist.send(mine, after)
    return {"batched": batched, "single": single}


def groups_and_objects() -> list[Any]:
    rank = dist.get_rank()
    device()
    pair = dist.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank}, group=pair)
    box = [f"from {rank}"]
    dist.broadcast_object_list(box, src=0)
    own_host_group = dist.new_group(backend="gloo")
    on_host = torch.tensor(float(rank))
    dist.all_reduce(on_host, group=own_host_group)
    return [gathered, box, on_host.item()]


def test_collectives_have_gloos_numbers(ranks, devices):
    assert devices.run(collectives, world_size=2) == ranks.run(collectives, world_size=2)


def test_groups_and_objects(ranks, devices):
    expected = [[[{"rank": 0}, {"rank": 1}], ["from 0"], 6.0]] * 2 + [
        [[{"rank": 2}, {"rank": 3}], ["from 0"], 6.0]
    ] * 2
    assert (
        devices.run(groups_and_objects, world_size=4)
        == ranks.run(groups_and_objects, world_size=4)
        == expected
    )


def reduce_on_the_cpu() -> None:
    dist.all_reduce(torch.ones(2))


def gather_into_the_cpu() -> None:
    dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2, device=device()))


def send_from_the_cpu() -> None:
    operation = dist.isend if dist.get_rank() == 0 else dist.irecv
    for work in dist.batch_isend_irecv([dist.P2POp(operation, torch.ones(2), 1 - dist.get_rank())]):
        work.wait()


def use_two_devices() -> None:
    dist.all_reduce(torch.ones(2, device=device()))
    dist.all_reduce(torch.ones(2, device="standin:5"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (reduce_on_the_cpu, "No backend type associated with device type cpu"),
        (gather_into_the_cpu, "device type cpu"),
        (send_from_the_cpu, "device type cpu"),
        (use_two_devices, "gave its group a tensor of standin:5"),
    ],
)
def test_tensors_of_another_device_are_refused(devices: RankPool, function: Callable[[], None], message: str):
    with pytest.raises(RankFailed, match=message):
        devices.run(function, world_size=2)


def receive_late() -> list[float]:
    """Return the message as rank 1 reads it, before and after waiting."""
    rank, here = dist.get_rank(), device()
    numbers = torch.zeros(3, device=here)
    if rank == 0:
        torch.distributed.distributed_c10d._get_default_store().wait(["looked"])
        dist.send(numbers + 5, 1)
        return []
    work = dist.irecv(numbers, 0)
    early = numbers.sum().item()
    torch.distributed.distributed_c10d._get_default_store().set("looked", "")
    work.wait()
    return [early, numbers.sum().item()]


def test_a_message_is_not_there_before_it_is_waited_for(devices):
    early, late = devices.run(receive_late, world_size=2)[1]
    assert early != early, "not a number until then"
    assert late == 15
