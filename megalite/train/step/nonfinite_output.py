"""Names the first module whose output is not finite, by one more forward of the batch that gave such a loss."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megalite.config.sections.schema import RunConfig
from megalite.model.replica import Replica
from megalite.parallel.gradients import first_nonfinite_part
from megalite.topology.axes import Layout


@dataclass(frozen=True, order=True)
class NonFiniteOutput:
    """A module whose output is not finite; the smallest is the first in model order, one with a cause preferred.

    chunk, place: its chunk, and its place in the order in which the modules of a chunk end.
    weight: the first weight on `rank` that is not finite itself; empty if there is none.
    """

    chunk: int
    place: int
    without_cause: bool
    rank: int
    module: str
    weight: str

    def describe(self, layout: Layout) -> str:
        """Return the facts as a clause, with the rank's stage."""
        where = (
            f"the first output that is not finite is that of {self.module} on {layout.describe(self.rank)}"
        )
        return f"{where}, whose {self.weight} is not finite itself" if self.weight else where


def nonfinite_cause(config: RunConfig, replica: Replica, loss: float, forward: Callable[[], object]) -> str:
    """Return where the forward of a step went wrong, and a remedy; empty if the loss is finite.

    forward: as of `first_nonfinite_output`. Collective: the loss is the same on every rank, and no weight has changed.
    """
    if math.isfinite(loss):
        return ""
    output = first_nonfinite_output(replica, forward)
    if output is None:
        return ""
    remedy = (
        "lower optimizer.learning_rate, set optimizer.gradient_clipping, or look at the data of this step"
    )
    if config.training.precision == "fp16":
        remedy = f'use training.precision = "bf16", {remedy}'
    if output.weight:
        remedy = f'name an earlier checkpoint: checkpoint.resume = "{config.run.folder}/checkpoints/step-..."'
    return (
        f"the loss is {loss}: {output.describe(config.layout)}; no weight was changed; {remedy}, then run"
        " again to resume"
    )


def first_nonfinite_output(replica: Replica, forward: Callable[[], object]) -> NonFiniteOutput | None:
    """Call `forward` and return the first module of the model whose output is not finite in it.

    forward: runs the batch of the same step through the pipeline, on every rank. None: all outputs are finite, or the
    modules were compiled into others. Collective over the world.
    """
    mesh = replica.mesh
    outputs: list[_Output] = []
    hooks = list(_watch(replica, outputs))
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    output = None
    if broken := [(each.chunk, each.place, each.module) for each in outputs if not each.finite]:
        chunk, place, module = min(broken)
        weight = _first_nonfinite_weight(replica)
        output = NonFiniteOutput(chunk, place, not weight, mesh.rank, module, weight)
    gathered = mesh.gather_objects(output) or []
    first: NonFiniteOutput | None = mesh.broadcast_object(
        min((each for each in gathered if each is not None), default=None)
    )
    return first


@dataclass(frozen=True)
class _Output:
    """One call of a module; finite: a bool on the device, read once the forward is over."""

    chunk: int
    place: int
    module: str
    finite: Tensor


def _watch(replica: Replica, outputs: list[_Output]) -> Iterator[RemovableHandle]:
    """Have each module of the stage add an _Output whenever it is called."""
    names = {module: name for name, module in replica.stage.named_modules() if name}
    for chunk in replica.stage.chunks:
        places: dict[str, int] = {}  # in the order of the first micro batch
        for module in chunk.modules():
            if module in names:
                yield module.register_forward_hook(_recorder(chunk.index, names[module], places, outputs))


def _recorder(
    chunk: int, name: str, places: dict[str, int], outputs: list[_Output]
) -> Callable[[nn.Module, object, object], None]:
    def record(_module: nn.Module, _inputs: object, output: object) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        finite = [each.detach().isfinite().all() for each in tensors if isinstance(each, Tensor)]
        if finite:
            place = places.setdefault(name, len(places))
            outputs.append(_Output(chunk, place, name, torch.stack(finite).all()))

    return record


def _first_nonfinite_weight(replica: Replica) -> str:
    """Return the name of the first weight, in model order, of which this rank holds a value that is not finite."""
    for parameter in replica.parameters:
        tensor = replica.tensors[parameter.name]
        # ZeRO 3 keeps a flat part of the weight, whose place in a fused weight is not looked for.
        shard = getattr(tensor, "ds_tensor", None)
        if shard is not None and not shard.isfinite().all():
            return parameter.name
        if shard is None and not tensor.isfinite().all():
            return first_nonfinite_part(parameter, tensor, replica.mesh)
    return ""
