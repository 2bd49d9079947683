"""Gradients after the pipeline: sums over copies, the mean over data-parallel ranks, the norm and its clipping."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.collectives import all_reduce
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import EMBEDDING, Parameter

# Large enough to hide the latency of a collective, small enough not to double the gradients' memory.
_BUCKET_BYTES = 64 << 20


def complete_gradients(
    parameters: Sequence[Parameter],
    tensors: Mapping[str, Tensor],
    mesh: ParallelMesh,
    gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad"),
) -> None:
    """Add up, once a step, what the copies of a weight each have of its gradient, before it is averaged over dp.

    Over tp: of weights that each rank has whole and uses for its own positions or heads. Over the end stages: of tied
    weights. Collective over both. gradient_of: where a parameter's gradient is; not its `.grad` under some optimizers.
    """

    def gradient(parameter: Parameter) -> Tensor:
        found = gradient_of(tensors[parameter.name])
        if found is None:
            raise AssertionError(f"{parameter.name} has no gradient: the stage that holds it did not use it")
        return found

    partial = [gradient(parameter) for parameter in parameters if partial_over_tp(parameter, mesh)]
    for bucket in _buckets(partial):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        _scatter_back(bucket, all_reduce(flat, mesh.tp))
    for parameter in parameters:
        if len(parameter.spec.stages) > 1:
            all_reduce(gradient(parameter), mesh.ends)


def partial_over_tp(parameter: Parameter, mesh: ParallelMesh) -> bool:
    """Whether backward leaves each tensor-parallel rank a part of the gradient of a weight that all have whole."""
    spec = parameter.spec
    return spec.dim is None and mesh.tp.size > 1 and (spec.summed or mesh.sequence_parallel)


def copy_shared_weights(
    parameters: Sequence[Parameter], tensors: Mapping[str, Tensor], mesh: ParallelMesh
) -> None:
    """Overwrite the other copies of a tied weight with the first stage's. Collective over the end stages.

    The copies see the same gradient, but reductions round by an element's place in a buffer, which differs
    between stages: without this they would drift apart by a last digit a step.
    """
    if mesh.ends.size > 1:
        for parameter in parameters:
            if len(parameter.spec.stages) > 1:
                dist.broadcast(tensors[parameter.name].data, src=mesh.ends.ranks[0], group=mesh.ends.group)


def average_over_data(gradients: Sequence[Tensor], mesh: ParallelMesh) -> None:
    """Replace each gradient by its mean over dp, in place, a bucket a collective."""
    if mesh.dp.size == 1:
        return
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=mesh.dp.group)
        _scatter_back(bucket, flat.div_(mesh.dp.size))


def counted_here(parameter: Parameter, mesh: ParallelMesh) -> bool:
    """Whether this rank's copy counts: replicas do on tp rank 0, tied weights on their first stage."""
    spec = parameter.spec
    if spec.dim is None and mesh.tp.rank != 0:
        return False
    return len(spec.stages) < 2 or mesh.at.pp == spec.stages[0]


def global_norm(parameters: Sequence[Parameter], tensors: Mapping[str, Tensor], mesh: ParallelMesh) -> float:
    """L2 norm of the whole model's gradient, every element counted once; equal on all ranks of a replica.

    Accumulated in float64 over parameters. Collective over tp x pp.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for parameter in parameters:
        gradient = tensors[parameter.name].grad
        if gradient is not None and counted_here(parameter, mesh):
            wide = gradient if gradient.element_size() >= 4 else gradient.float()
            total += torch.linalg.vector_norm(wide).double().square()
    return float(all_reduce(total, mesh.replica).sqrt())


def first_nonfinite(
    parameters: Sequence[Parameter], tensors: Mapping[str, Tensor], mesh: ParallelMesh
) -> str | None:
    """The canonical name of the tensor, with its layer, where a gradient that is not finite arose; None: nowhere.

    A backward carries what is not finite on towards the embedding: so it arose in the last tensor, in forward
    order, that has it. Collective over the world.
    """
    found: list[tuple[float, int, str]] = []
    for index, parameter in enumerate(parameters):
        gradient = tensors[parameter.name].grad
        # What follows the layers stands on the last stage, the embedding before them; a tied one is the embedding.
        depth = -1.0 if parameter.name == EMBEDDING else math.inf
        if gradient is not None and not gradient.isfinite().all():
            name = _first_part(parameter, gradient, mesh)
            where = "" if parameter.layer is None else f" (layer {parameter.layer})"
            found.append((depth if parameter.layer is None else parameter.layer, index, name + where))
    gathered = mesh.gather_objects(max(found, default=None)) or []
    last = max((place for place in gathered if place is not None), default=None)
    name = mesh.broadcast_object(last and last[2])
    return name if name is None else str(name)


def _first_part(parameter: Parameter, gradient: Tensor, mesh: ParallelMesh) -> str:
    """The first part of a registered parameter whose gradient is not finite."""
    row = 0
    for part, box in parameter.spec.boxes(mesh.tp.rank, mesh.tp.size):
        if not gradient[row : row + box.shape[0]].isfinite().all():
            return part.name
        row += box.shape[0]
    return parameter.name


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply all gradients in place."""
    torch._foreach_mul_(list(gradients), factor)


def clip_values(gradients: Sequence[Tensor], *, limit: float) -> None:
    """Bring every element of the gradients into [-limit, limit], in place."""
    torch._foreach_clamp_min_(list(gradients), -limit)
    torch._foreach_clamp_max_(list(gradients), limit)


def clip_gradients(gradients: Sequence[Tensor], *, norm: float, max_norm: float) -> None:
    """Scale all gradients in place so that their global norm, now `norm`, is at most `max_norm`."""
    factor = max_norm / (norm + 1e-6)  # the same epsilon as torch's and DeepSpeed's clipping
    if factor < 1.0:
        scale_gradients(gradients, factor)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size >= _BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket


def _scatter_back(tensors: Sequence[Tensor], flat: Tensor) -> None:
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))
