"""One input through all chunks of a pipeline, without gradients and without a schedule: for generation."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.launcher.progress import now
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.stages import PipelineSplit


def along_chunks(
    chunks: Sequence[nn.Module],
    split: PipelineSplit,
    mesh: ParallelMesh,
    run: Callable[[nn.Module, Tensor | None], Tensor],
    hidden: Tensor,
) -> Tensor | None:
    """Return the last chunk's output on the stage that holds it, None on the others. Collective over the stages.

    run: computes one chunk; its input is None for the first chunk. hidden: an empty tensor of the shape and type of
    the hidden states between chunks.
    """
    here = mesh.at.pp
    own = dict(zip(split.chunks_of(here), chunks, strict=True))
    output: Tensor | None = None
    for index in range(len(split.layers)):
        stage = split.stage_of(index)
        if index > 0 and split.stage_of(index - 1) != stage:
            output = _hand_over(output, split.stage_of(index - 1), stage, mesh, hidden)
        if stage == here:
            output = run(own[index], output)
    return output if split.stage_of(len(split.layers) - 1) == here else None


def from_last_chunk(value: int, split: PipelineSplit, mesh: ParallelMesh) -> int:
    """Broadcast the value of the stage that holds the last chunk to all stages."""
    if mesh.pp.size == 1:
        return value
    sampled = torch.tensor(value, device=mesh.device)
    holder = mesh.pp.ranks[split.stage_of(len(split.layers) - 1)]
    now.collective("broadcast", mesh.pp.role)
    dist.broadcast(sampled, src=holder, group=mesh.pp.group)
    return int(sampled)


def _hand_over(
    output: Tensor | None, source: int, target: int, mesh: ParallelMesh, hidden: Tensor
) -> Tensor | None:
    if mesh.at.pp == source and output is not None:
        now.collective("send", mesh.pp.role)
        dist.send(output.contiguous(), dst=mesh.pp.ranks[target], group=mesh.pp.group)
    if mesh.at.pp == target:
        received = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        now.collective("recv", mesh.pp.role)
        dist.recv(received, src=mesh.pp.ranks[source], group=mesh.pp.group)
        return received
    return None
