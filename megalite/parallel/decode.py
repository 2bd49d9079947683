"""One input through all chunks of a pipeline, without gradients and without a schedule."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.launcher.control.progress import progress
from megalite.parallel.collectives import Pending
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.stages import PipelineSplit

T = TypeVar("T")


class Sends:
    """Sends to other stages that may not have ended; keeps their tensors. most: how many, before the oldest is awaited.

    With it a stage computes its next input while the other stage is still busy with an earlier one.
    """

    def __init__(self, most: int):
        self._most = most
        self._started: list[tuple[dist.Work, Tensor]] = []

    def start(self, values: Tensor, target: int, mesh: ParallelMesh) -> None:
        """Send contiguous values to a stage."""
        work = dist.isend(values, dst=mesh.pp_downwards.ranks[target], group=mesh.pp_downwards.group)
        if work is not None:
            self._started.append((work, values))
        while len(self._started) > self._most:
            self._started.pop(0)[0].wait()


def along_chunks(
    chunks: Sequence[T],
    split: PipelineSplit,
    mesh: ParallelMesh,
    run: Callable[[T, Tensor | None], Tensor],
    hidden: Tensor,
    sends: Sends | None = None,
) -> Tensor | None:
    """Return the last chunk's output on the stage that holds it, None on the others. Collective over the stages.

    run: computes one chunk; its input is None for the first chunk. hidden: an empty tensor of the shape and type of
    the hidden states between chunks. sends: given, this stage does not wait until its output has been received.
    """
    here = mesh.at.pp
    own = dict(zip(split.chunks_of(here), chunks, strict=True))
    output: Tensor | None = None
    for index in range(len(split.layers)):
        stage = split.stage_of(index)
        if index > 0 and split.stage_of(index - 1) != stage:
            output = _hand_over(output, split.stage_of(index - 1), stage, mesh, hidden, sends)
        if stage == here:
            output = run(own[index], output)
    return output if split.stage_of(len(split.layers) - 1) == here else None


def start_from_last_chunk(values: Tensor, split: PipelineSplit, mesh: ParallelMesh) -> Pending:
    """Start to broadcast `values` of the stage that holds the last chunk to all stages, in place.

    Not over the group of the hidden states, whose next transfers would wait for this broadcast on a GPU.
    """
    if mesh.pp.size == 1:
        return lambda: values
    ranks = mesh.pp_upwards
    holder = ranks.ranks[split.stage_of(len(split.layers) - 1)]
    progress.collective("broadcast", ranks.role)
    work = dist.broadcast(values, src=holder, group=ranks.group, async_op=True)

    def finish() -> Tensor:
        assert work is not None
        work.wait()
        return values

    return finish


def _hand_over(
    output: Tensor | None,
    source: int,
    target: int,
    mesh: ParallelMesh,
    hidden: Tensor,
    sends: Sends | None,
) -> Tensor | None:
    if mesh.at.pp == source and output is not None:
        progress.collective("send", mesh.pp.role)
        if sends is not None:
            sends.start(output.contiguous(), target, mesh)
        else:
            dist.send(output.contiguous(), dst=mesh.pp_downwards.ranks[target], group=mesh.pp_downwards.group)
    if mesh.at.pp == target:
        received = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        with progress.collective("recv", mesh.pp.role):
            dist.recv(received, src=mesh.pp_downwards.ranks[source], group=mesh.pp_downwards.group)
        return received
    return None
