"""Inside a decoder layer: [B, S, H] against [S, B, H] under sequence parallelism, and what the overlap brings.

    python -m benchmarks.sequence_layout [--quick]

Two ranks of one thread share a layer; forward and backward of B x S tokens. All forms are measured in one pair of
processes, in turn, so that a busy machine hurts all alike.

layer       median milliseconds of the layer as megalite runs it: [B, S, H], sequence parallel, backward overlapped.
copies      of it, the share of the copies that bring what a gather gives, and a reduce-scatter takes, into order along
            dim 1; measured on their own. With one sequence there are none.
sbh         the layer with collectives along dim 0 of [S, B, H], where nothing is copied and attention works on
            strided tensors, as a ratio to `layer`.
plain       the layer whose backward sums the gradient of the input before it computes the weight's, as a ratio.
tensor      the layer without sequence parallelism as a ratio, and `tensor plain` that without overlap.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import report
from benchmarks.ranks import run_ranks
from benchmarks.workload import SHAPE
from megalite.model.attention import SelfAttention
from megalite.model.context import StepContext
from megalite.model.layer import DecoderLayer
from megalite.model.rope import LayerRotations
from megalite.ops.attention_form import AttentionForm
from megalite.parallel import collectives, layers
from megalite.parallel.gradient_sums import BY_AUTOGRAD, WeightGradients
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape

WORLD = 2
WIDE = replace(
    SHAPE, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=16
)
CASES = [(shape, b, s) for shape, s in ((SHAPE, 256), (SHAPE, 1024), (WIDE, 256)) for b in (1, 2, 4)]
# Collectives in forward and backward of one layer: two gathers of inputs, the same again, two of gradients; sums alike.
GATHERS, REDUCE_SCATTERS = 6, 4


def _start_gather_dim_0(shard: Tensor, axis: RankGroup) -> Callable[[], Tensor]:
    shard = shard.contiguous()
    gathered = shard.new_empty(axis.size * shard.shape[0], *shard.shape[1:])
    work = dist.all_gather_single(gathered, shard, group=axis.group, async_op=True)
    return lambda: (work.wait(), gathered)[1]


def _start_reduce_scatter_dim_0(partial_sums: Tensor, axis: RankGroup) -> Callable[[], Tensor]:
    partial_sums = partial_sums.contiguous()
    scattered = partial_sums.new_empty(partial_sums.shape[0] // axis.size, *partial_sums.shape[1:])
    work = dist.reduce_scatter_single(scattered, partial_sums, group=axis.group, async_op=True)
    return lambda: (work.wait(), scattered)[1]


def _attention_of_sbh(self: SelfAttention, hidden_states: Tensor, context: StepContext, mask: None) -> Tensor:
    qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
    assert context.rotation is not None
    query, key, value = self._heads(qkv, context.rotation.of(self.window))
    form = AttentionForm(self.window, scale=self.scale, softcap=self.softcap)
    attended = self._attend(form, query, key, value)
    return self.o_proj(attended.transpose(0, 1).flatten(2))


@contextmanager
def _sequence_first() -> Iterator[None]:
    with (
        mock.patch.object(collectives, "start_gather", _start_gather_dim_0),
        mock.patch.object(collectives, "start_reduce_scatter", _start_reduce_scatter_dim_0),
        mock.patch.object(layers, "start_gather", _start_gather_dim_0),
        mock.patch.object(layers, "start_reduce_scatter", _start_reduce_scatter_dim_0),
        mock.patch.object(SelfAttention, "forward", _attention_of_sbh),
    ):
        yield


def _linear_after_gather(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mesh: ParallelMesh,
    gradients: WeightGradients = BY_AUTOGRAD,
) -> Tensor:
    return layers.linear(collectives.column_input(hidden_states, mesh), weight, bias, gradients)


@contextmanager
def _not_overlapped() -> Iterator[None]:
    with mock.patch.object(layers, "column_linear", _linear_after_gather):
        yield


class Form:
    """One way to run the layer, and its times."""

    def __init__(
        self,
        shape: ModelShape,
        batch: int,
        length: int,
        *,
        sequence_parallel: bool = True,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        mesh = ParallelMesh.over_world(Layout(tensor=WORLD), sequence_parallel=sequence_parallel)
        self.layer = DecoderLayer(shape, 0, mesh)
        for parameter in self.layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        held = len(mesh.sequence_range(length))
        size = (held, batch) if within is _sequence_first else (batch, held)
        self.inputs = torch.randn(*size, shape.hidden_size, requires_grad=True)
        self.grad = torch.randn_like(self.inputs)
        rotations = LayerRotations(replace(shape, max_position_embeddings=length))
        self.context = StepContext(rotations(torch.arange(length).unsqueeze(0)))
        self.within = within
        self.seconds: list[float] = []

    def run(self) -> None:
        with self.within():
            dist.barrier()
            started = time.perf_counter()
            self.layer(self.inputs, self.context).backward(self.grad)
            self.seconds.append(time.perf_counter() - started)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds[1:])


def _copies(shape: ModelShape, batch: int, length: int, rounds: int) -> float:
    """Median seconds of all copies of forward and backward."""
    gathered = torch.randn(WORLD, batch, length // WORLD, shape.hidden_size)
    sums = torch.randn(batch, length, shape.hidden_size)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(GATHERS):
            gathered.transpose(0, 1).flatten(1, 2)
        for _ in range(REDUCE_SCATTERS):
            sums.unflatten(1, (WORLD, -1)).transpose(0, 1).contiguous()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure_on_rank(shape: ModelShape, batch: int, length: int, rounds: int) -> dict[str, float]:
    """Medians in seconds of this rank."""
    size = (shape, batch, length)
    forms: Mapping[str, Form] = {
        "layer": Form(*size),
        "sbh": Form(*size, within=_sequence_first),
        "plain": Form(*size, within=_not_overlapped),
        "tensor": Form(*size, sequence_parallel=False),
        "tensor plain": Form(*size, sequence_parallel=False, within=_not_overlapped),
    }
    for _ in range(rounds + 1):
        for form in forms.values():
            form.run()
    return {name: form.median for name, form in forms.items()} | {"copies": _copies(*size, rounds)}


def _row(shape: ModelShape, batch: int, length: int, rounds: int) -> dict[str, Any]:
    seen = run_ranks(measure_on_rank, WORLD, shape, batch, length, rounds)
    slowest = {name: max(rank[name] for rank in seen) for name in seen[0]}
    layer = slowest.pop("layer")
    return {
        "hidden": shape.hidden_size,
        "B": batch,
        "S": length,
        "layer": round(layer * 1e3, 2),
        **{name: round(seconds / layer, 3) for name, seconds in slowest.items()},
    }


def main() -> None:
    options = report.arguments(__doc__)
    facts = report.machine()
    cases, rounds = (CASES[:2], 5) if options.quick else (CASES, 40)
    rows = [_row(*case, rounds) for case in cases]
    columns = {"hidden": "H", "B": "B", "S": "S", "layer": "layer, ms"}
    columns |= {name: name for name in ("copies", "sbh", "plain", "tensor", "tensor plain")}
    report.show("One decoder layer on two ranks; ratios to the layer", rows, columns)
    report.write("sequence-layout", facts, {"rounds": rounds}, rows, options.results)


if __name__ == "__main__":
    main()
