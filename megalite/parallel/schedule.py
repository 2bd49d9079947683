"""Runs one stage's part of a pipeline schedule: the actions of topology.schedules and the transfers between stages.

Transfers start in the order of topology.transfers, and no send is waited for while anything is left to compute. A split
backward is a whole one that leaves the weight gradients to W (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.launcher.control.progress import progress
from megalite.parallel.gradient_sums import deferred_weight_gradients
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.topology.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from megalite.topology.transfers import Message, ScheduledAction, StageProgram, Transfer

# (chunk, micro batch, hidden states, or None for the first chunk) -> hidden states; the last chunk: its loss, a scalar.
RunChunk = Callable[[int, int, Tensor | None], Tensor]


class StageSchedule:
    """One stage's actions of a step, in their order. Making one is collective over the stages."""

    def __init__(self, program: StageProgram, mesh: ParallelMesh):
        self._program, self._mesh = program, mesh
        actions = [step.action for step in program if isinstance(step, ScheduledAction)]
        # Chunk -> the last action that adds to its weights' gradients.
        self._last = {action.chunk: action for action in actions if action.kind in (BACKWARD, WEIGHT)}
        _connect(program, mesh)

    def completes_in_backward(self, chunk: int, micro_batch: int) -> bool:
        """Return whether the unsplit backward of this micro batch completes the gradients of the chunk's weights."""
        last = self._last[chunk]
        return last.kind == BACKWARD and last.micro_batch == micro_batch

    def run(self, run_chunk: RunChunk, hidden: Tensor, complete: Callable[[int], None]) -> None:
        """Run forward and backward of all micro batches.

        hidden: a tensor of the shape, type and device of the hidden states between chunks; its values are not used.
        complete: called with each chunk once the gradients of its weights are complete.
        """
        step = _Step(self._program, _Transfers(self._mesh, hidden), run_chunk)
        for action in step.run():
            if action == self._last[action.chunk]:
                complete(action.chunk)


def _connect(program: StageProgram, mesh: ParallelMesh) -> None:
    """Send a number along each way of the messages, in one order on all stages.

    NCCL connects two ranks at their first message, for which both wait; in the order of the schedule, two stages could
    each wait for another connection.
    """
    for source, target in sorted(
        {(step.source, step.target) for step in program if isinstance(step, Transfer)}
    ):
        group, number = _group(mesh, source, target), torch.zeros(1, device=mesh.device)
        start, peer = (dist.isend, target) if source == mesh.at.pp else (dist.irecv, source)
        _finish(start(number, group.ranks[peer], group.group))


class _Step:
    """The state of one step: what waits for its backward, its W, its transfer or the next chunk on this stage."""

    def __init__(self, program: StageProgram, transfers: "_Transfers", run_chunk: RunChunk):
        self._program, self._transfers, self._run_chunk = program, transfers, run_chunk
        # (chunk, micro batch) -> the hidden states that entered, and where the gradient enters the graph.
        self._graphs: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | Tensor]] = {}
        self._weight_gradients: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._made: dict[Message, Tensor] = {}

    def run(self) -> Iterator[Action]:
        """Yield each action once it is computed."""
        for step in self._program:
            if isinstance(step, ScheduledAction):
                needed = self._needed(step)
                with progress.span("actions", step.action):
                    made = self._compute(step.action, needed)
                if step.gives is not None and made is not None:
                    self._made[step.gives] = made
                yield step.action
            elif step.target == self._transfers.stage:
                self._transfers.receive(step)
            else:
                self._transfers.send(step, self._made.pop(step.message))
        self._transfers.finish()

    def _needed(self, scheduled: ScheduledAction) -> Tensor | None:
        message = scheduled.needs
        if message is None:
            return None
        if message in self._made:
            return self._made.pop(message)
        values = self._transfers.wait(message)
        for message in scheduled.arrived:
            self._transfers.arrived(message)
        return values

    def _compute(self, action: Action, needed: Tensor | None) -> Tensor | None:
        """Run an action; return the hidden states or the gradient for the neighbouring chunk, if it makes any."""
        place = (action.chunk, action.micro_batch)
        if action.kind == FORWARD:
            return self._forward(*place, needed)
        if action.kind == BACKWARD:
            return self._backward(*place, needed)
        if action.kind == INPUT:
            with deferred_weight_gradients() as deferred:
                gradient = self._backward(*place, needed)
            self._weight_gradients[place] = deferred
            return gradient
        for compute in self._weight_gradients.pop(place):
            compute()
        return None

    def _forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor | None:
        if hidden is not None:
            hidden.requires_grad_()
        output = self._run_chunk(chunk, micro_batch, hidden)
        if output.dim() == 0:
            self._graphs[chunk, micro_batch] = hidden, output
            return None
        # The edge, not the tensor: its memory is free once the next stage has it.
        self._graphs[chunk, micro_batch] = hidden, get_gradient_edge(output)
        return output.detach()

    def _backward(self, chunk: int, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        hidden, end = self._graphs.pop((chunk, micro_batch))
        torch.autograd.backward(end, gradient)
        return None if hidden is None else hidden.grad


class _Transfers:
    """The messages of one stage in one step that are under way."""

    def __init__(self, mesh: ParallelMesh, hidden: Tensor):
        self.stage = mesh.at.pp
        self._mesh, self._hidden = mesh, hidden
        self._coming: dict[Message, tuple[Tensor, dist.Work | None]] = {}
        self._going: dict[Message, tuple[Tensor, dist.Work | None]] = {}

    def receive(self, transfer: Transfer) -> None:
        """Start to receive a message."""
        values = torch.empty_like(self._hidden, memory_format=torch.contiguous_format)
        group = _group(self._mesh, transfer.source, self.stage)
        source = group.ranks[transfer.source]
        work = dist.irecv(values, source, group.group, tag=_tag(transfer.message))
        self._coming[transfer.message] = values, work

    def send(self, transfer: Transfer, values: Tensor) -> None:
        """Start to send a message; `values` are kept until it has arrived."""
        values = values.contiguous()
        group = _group(self._mesh, self.stage, transfer.target)
        target = group.ranks[transfer.target]
        work = dist.isend(values, target, group.group, tag=_tag(transfer.message))
        self._going[transfer.message] = values, work

    def wait(self, message: Message) -> Tensor:
        """Return the values of a message, whose receive was started."""
        values, work = self._coming.pop(message)
        with progress.collective("recv", self._mesh.pp.role), progress.span("waits", message):
            _finish(work)
        return values

    def arrived(self, message: Message) -> None:
        """Free the values of a sent message that is known to have arrived."""
        _, work = self._going.pop(message)
        _finish(work)

    def finish(self) -> None:
        """Wait until all sent messages have arrived."""
        if self._going:
            progress.collective("send", self._mesh.pp.role)
        for message in [*self._going]:
            with progress.wait(self._mesh.pp.role), progress.span("sends", message):
                self.arrived(message)


def _group(mesh: ParallelMesh, source: int, target: int) -> RankGroup:
    """Return the stages' group for messages of one direction.

    NCCL runs what two ranks send each other in one group one by one: a send would wait for a receive of the other
    direction that starts later.
    """
    return mesh.pp_downwards if source < target else mesh.pp_upwards


def _tag(message: Message) -> int:
    """Return a number that no other message between two stages has at the same time."""
    return message.micro_batch << 16 | message.chunk << 1 | (message.kind == "B")


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
