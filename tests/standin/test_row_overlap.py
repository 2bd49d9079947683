"""On an accelerator a row-parallel product is summed over tp in chunks, each while the next one is multiplied."""

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.parallel import layers
from megalite.parallel.device import local_device
from megalite.parallel.layers import RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.adapter import Lora
from megalite.topology.axes import Layout
from tests.support.hardware_queues import COMPUTES, Command, Issued, Meeting
from tests.support.issued import recorded
from tests.support.options import Dropout, Recompute
from tests.support.parity import OPERATOR_RTOL, assert_close, assert_same_tensors, layout_bounds
from tests.support.ranks import RankPool
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, RankResult, full_gradients, full_tensors, train_on_rank

PRODUCTS = ("addmm", "bmm", "mm")


class _Products(TorchDispatchMode):
    """Notes each product among the commands of the computing stream."""

    def __init__(self, issued: Issued) -> None:
        super().__init__()
        self._issued = issued

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in PRODUCTS:
            self._issued.compute("product")
        return func(*args, **(kwargs or {}))


def launches(sequences: int, length: int, sequence_parallel: bool) -> list[str]:
    """Return in order what a forward issues: its products, its collectives, and the waits for these."""
    here = local_device(dist.get_rank(), dist.get_world_size())
    mesh = ParallelMesh.over_world(Layout(tensor=2), here, sequence_parallel=sequence_parallel)
    with torch.device(here):
        linear = RowParallelLinear(4, 3, mesh=mesh, dtype=torch.float32)
        inputs = torch.zeros(sequences, length, 4)
    with recorded() as issued, _Products(issued):
        linear(inputs)
    return list(_described(issued.commands))


def _described(commands: list[Command]) -> Iterator[str]:
    """Yield the products, the operators of collectives, and the number of the collective that is waited for."""
    ends: list[Hashable] = []
    for stream, kind, of in commands:
        if kind == "record" and stream != COMPUTES:
            ends.append(of)
        elif kind == "wait" and stream == COMPUTES:
            yield f"wait {ends.index(of)}"
        elif isinstance(of, Meeting):
            yield of.name.partition(" in ")[0]
        elif kind == "compute":
            yield str(of)


# Sequences, their length -> chunks.
CHUNKS = {(1, 2046): 1, (1, 2048): 2, (1, 9000): 4, (2, 4096): 4, (3, 1024): 3, (8, 1000): 1}


@pytest.mark.parametrize(("sequences", "length"), cases(CHUNKS, core=((1, 2046), (1, 2048), (3, 1024))))
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
def test_a_chunk_is_summed_while_the_next_one_is_multiplied(
    devices: RankPool, sequences: int, length: int, sequence_parallel: bool
) -> None:
    chunks = CHUNKS[sequences, length]
    operator = "reduce_scatter_single" if sequence_parallel else "all_reduce"
    expected = ["product", operator] * chunks + [f"wait {number}" for number in range(chunks)]
    form = {"sequences": sequences, "length": length, "sequence_parallel": sequence_parallel}
    assert devices.run(launches, 2, **form) == [expected] * 2


def launches_while_compiling() -> list[str]:
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        return launches(1, 2048, sequence_parallel=False)


def test_while_compiling_there_is_one_product(devices: RankPool) -> None:
    assert devices.run(launches_while_compiling, 2) == [["product", "all_reduce", "wait 0"]] * 2


def trained_in_chunks(job: Job) -> tuple[RankResult, int]:
    """Return the result of a job that may have chunks of two tokens, and how many chunks it multiplied."""
    with (
        mock.patch.object(layers, "_CHUNK_TOKENS", 2),
        mock.patch.object(torch, "bmm", wraps=torch.bmm) as multiplied,
    ):
        return train_on_rank(job), multiplied.call_count


TP, SPLIT = {"layout": Layout(tensor=2)}, {"layout": Layout(tensor=2), "sequence_parallel": True}
PIPELINE = {"layout": Layout(tensor=2, pipeline=2), "chunks_per_stage": 2}
ZERO_3 = {"sequence_parallel": True, "zero_stage": 3, "dtype": torch.float32}  # which has no float64
JOBS: dict[str, dict[str, Any]] = {
    "tp": TP,
    "tp, sequence": SPLIT,
    "tp, two sequences each": {**TP, "micro_batch_size": 2, "dropout": Dropout(0.1, 0.1, 0.1)},
    "tp, sequence, biases, recompute": {
        **SPLIT,
        "shape": FAMILY_SHAPES["gpt2"],
        "micro_batch_size": 8,
        "recompute": Recompute("full"),
    },
    "deferred weight gradients": {**PIPELINE, "schedule": "zbv", "sequence_parallel": True},
    "tp 4": {"layout": Layout(tensor=4), "sequence_parallel": True},
    "zero 3": {"layout": Layout(tensor=2, data=2), **ZERO_3},
    "frozen weights": {**SPLIT, "shape": replace(tiny_shape(), adapter=Lora(3, 6.0, ("q_proj",)))},
}


@pytest.mark.parametrize("name", cases(JOBS, core=("tp", "tp, sequence")))
def test_chunks_train_as_one_product_does(ranks: RankPool, devices: RankPool, name: str) -> None:
    job = Job(**{"shape": tiny_shape(), "steps": 2, **JOBS[name]})
    chunked, chunks = zip(*devices.run(trained_in_chunks, job.layout.world_size, job=job), strict=True)
    whole, chunks_on_cpu = zip(*ranks.run(trained_in_chunks, job.layout.world_size, job=job), strict=True)
    assert all(chunks) and not any(chunks_on_cpu), "a CPU has one product and one collective"
    rtol = layout_bounds("fp32" if job.zero_stage else "fp64", job.zero_stage)["losses"]
    for one, other in zip(chunked, whole, strict=True):
        assert_close(one.losses, other.losses, rtol=rtol, what="losses")
        assert_close(one.norms, other.norms, rtol=rtol, what="norms")
    assert_same_tensors(full_gradients(job, chunked), full_gradients(job, whole), rtol=rtol)
    weights = [
        full_tensors(job.shape, [shard for rank in each for shard in rank.final], add=False)
        for each in (chunked, whole)
    ]
    assert_same_tensors(*weights, rtol=rtol)


def outputs_without_gradients(sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a long prompt's output without autograd: in chunks, by one product, and the number of chunks."""
    here = local_device(dist.get_rank(), dist.get_world_size())
    mesh = ParallelMesh.over_world(Layout(tensor=2), here, sequence_parallel=sequence_parallel)
    random = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(1, 2048, 4, generator=random, dtype=torch.float64).to(here)
    with torch.device(here):
        linear = RowParallelLinear(4, 3, mesh=mesh, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(3, 4, generator=random, dtype=torch.float64))
        chunked, count = linear(inputs), layers.chunks_per_sequence(inputs, mesh)
        with mock.patch.object(layers, "chunks_per_sequence", return_value=0):
            whole = linear(inputs)
    return chunked.cpu(), whole.cpu(), count


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
def test_a_prompt_without_gradients_has_the_same_output(devices: RankPool, sequence_parallel: bool) -> None:
    for chunked, whole, count in devices.run(
        outputs_without_gradients, world_size=2, sequence_parallel=sequence_parallel
    ):
        assert count == 2 and whole.abs().min() > 0
        assert_close(chunked, whole, rtol=OPERATOR_RTOL, what="the output")
