"""Gradients after the pipeline: sums over tensor-parallel copies and tied weights, the norm and its clipping."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from operator import attrgetter
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.launcher.control.progress import now
from megalite.ops.choice import PLAIN_TORCH, Operators
from megalite.parallel.collectives import all_reduce
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import EMBEDDING, Parameter
from megalite.topology.sharding import Part

T = TypeVar("T")

# Large enough to hide the latency of a collective, small enough not to double the gradients' memory.
_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class _Share:
    """This rank's copy of elements of a weight or gradient that are replicated over tp.

    start: the elements' offset in the flattened canonical tensor; total: that tensor's size. first: whether this rank
    is the first holder; true on every rank if all ranks hold the whole tensor.
    """

    values: Tensor
    start: int
    total: int
    first: bool


def all_reduce_replicated_gradients(
    parameters: Sequence[Parameter],
    tensors: Mapping[str, Tensor],
    mesh: ParallelMesh,
    gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad"),
) -> None:
    """Sum, once a step and before the sum over dp, the partial gradients of weights that several ranks hold.

    Over tp: weights that each rank holds whole but uses for its own positions or heads only, and key-value heads that
    ranks share (all ranks but the first then hold zeros as their gradient, so that every norm counts it once). Over the
    stages that hold a copy: tied weights. Collective over both. gradient_of: returns a parameter's gradient.
    """

    def gradient(parameter: Parameter) -> Tensor:
        found = gradient_of(tensors[parameter.name])
        if found is None:
            raise AssertionError(f"{parameter.name} has no gradient: the stage that holds it did not use it")
        return found

    concerned = [each for each in parameters if _is_partial(each, mesh)]
    _add_up([share for each in concerned for share in _shares(each, gradient(each), mesh)], mesh)
    for parameter in parameters:
        if len(parameter.spec.stages) > 1:
            all_reduce(gradient(parameter), mesh.tied_over(parameter.spec.stages))


def all_reduce_replicated_in_backward(
    parameters: Sequence[Parameter], tensors: Mapping[str, Tensor], mesh: ParallelMesh
) -> None:
    """Make every backward sum replicated gradients over tp: one collective for each weight, instead of once a step.

    For an optimizer that takes gradients away in backward (ZeRO 2 and 3), which has one pipeline stage.
    """

    def complete(parameter: Parameter, given: Tensor) -> Tensor:
        gradient = given.clone(memory_format=torch.contiguous_format)
        _add_up([*_shares(parameter, gradient, mesh)], mesh)
        return gradient

    for parameter in parameters:
        if _is_partial(parameter, mesh):
            tensors[parameter.name].register_hook(partial(complete, parameter))


def partial_over_tp(parameter: Parameter, part: Part, mesh: ParallelMesh) -> bool:
    """Return whether backward leaves each tensor-parallel rank with a partial gradient of a replicated part."""
    spec = parameter.spec
    whole = spec.dim is None and mesh.tp.size > 1 and (spec.summed or mesh.sequence_parallel)
    return whole or spec.is_shared(part, mesh.tp.size)


def waits_for_other_ranks(parameter: Parameter, mesh: ParallelMesh) -> bool:
    """Return whether `all_reduce_replicated_gradients` completes the gradient of this parameter."""
    return len(parameter.spec.stages) > 1 or _is_partial(parameter, mesh)


def _is_partial(parameter: Parameter, mesh: ParallelMesh) -> bool:
    return any(partial_over_tp(parameter, part, mesh) for part in parameter.spec.parts)


def sync_tied_weights(
    parameters: Sequence[Parameter], tensors: Mapping[str, Tensor], mesh: ParallelMesh
) -> None:
    """Overwrite all copies of a tied weight with the first stage's copy, and of a shared head with the first rank's.

    Tied copies see the same gradient, but reductions round by an element's place in a buffer, which differs
    between stages: without this they would drift apart by a last digit a step. Collective over tp and the stages that
    hold copies.
    """
    size = mesh.tp.size
    shared = [each for each in parameters if any(each.spec.is_shared(part, size) for part in each.spec.parts)]
    shares = [share for each in shared for share in _shares(each, tensors[each.name].data, mesh)]
    for share, total in _sums_over_tp(shares, mesh, of_first=True):
        share.values.copy_(total)
    for parameter in parameters:
        if len(parameter.spec.stages) > 1:
            copies = mesh.tied_over(parameter.spec.stages)
            now.collective("broadcast", copies.role)
            dist.broadcast(tensors[parameter.name].data, src=copies.ranks[0], group=copies.group)


def _shares(parameter: Parameter, tensor: Tensor, mesh: ParallelMesh) -> Iterator[_Share]:
    spec, row = parameter.spec, 0
    for part, region in spec.slices(mesh.tp.rank, mesh.tp.size):
        if partial_over_tp(parameter, part, mesh):
            first = spec.dim is None or spec.first_holder(part, mesh.tp.rank, mesh.tp.size) == mesh.tp.rank
            start = region.offsets[0] * prod(part.shape[1:])
            yield _Share(tensor[row : row + region.shape[0]], start, prod(part.shape), first)
        row += region.shape[0]


def _add_up(shares: Sequence[_Share], mesh: ParallelMesh) -> None:
    """Set the first copy of each gradient to its sum over tp, and the other copies to zero."""
    for share, total in _sums_over_tp(shares, mesh):
        if share.first:
            share.values.copy_(total)
        else:
            share.values.zero_()


def _sums_over_tp(
    shares: Sequence[_Share], mesh: ParallelMesh, *, of_first: bool = False
) -> Iterator[tuple[_Share, Tensor]]:
    """Yield each share with the sum over tp of all copies of its elements (of_first: with the first copy).

    One collective for each bucket.
    """
    for bucket in buckets(
        shares, lambda share: (share.values.dtype, share.total * share.values.element_size())
    ):
        places = [*accumulate((share.total for share in bucket), initial=0)]
        flat = bucket[0].values.new_zeros(places[-1])
        held = [
            flat[place + share.start :][: share.values.numel()].view(share.values.shape)
            for place, share in zip(places[:-1], bucket, strict=True)
        ]
        for share, elements in zip(bucket, held, strict=True):
            if share.first or not of_first:
                elements.copy_(share.values)
        all_reduce(flat, mesh.tp)
        yield from zip(bucket, held, strict=True)


def counted_here(parameter: Parameter, mesh: ParallelMesh) -> bool:
    """Return whether this rank's copy counts: replicas count on tp rank 0, tied weights on their first stage.

    Key-value heads shared by ranks need no rule: all ranks but the first hold zeros as their gradient.
    """
    spec = parameter.spec
    if spec.dim is None and not mesh.counts_replicated:
        return False
    return len(spec.stages) < 2 or mesh.at.pp == spec.stages[0]


def squared_norm_share(
    parameters: Sequence[Parameter],
    tensors: Mapping[str, Tensor],
    mesh: ParallelMesh,
    *,
    ops: Operators = PLAIN_TORCH,
) -> Tensor:
    """Return this rank's share of the squared L2 norm of the whole model's gradient, [] float64 on the mesh's device.

    The shares of all ranks sum to it; every element counts once. The gradients are summed over dp already.
    """
    found = [tensors[each.name].grad for each in parameters if counted_here(each, mesh)]
    gradients = [gradient for gradient in found if gradient is not None]
    return ops.sum_of_squares(gradients).to(mesh.device) / mesh.dense_gradients.size


def global_norm(
    parameters: Sequence[Parameter],
    tensors: Mapping[str, Tensor],
    mesh: ParallelMesh,
    *,
    ops: Operators = PLAIN_TORCH,
) -> float:
    """Return the L2 norm of the whole model's gradient, equal on all ranks. Collective over the world."""
    share = squared_norm_share(parameters, tensors, mesh, ops=ops)
    return math.sqrt(float(mesh.reduce_over_world(share)))


def first_nonfinite(
    parameters: Sequence[Parameter], tensors: Mapping[str, Tensor], mesh: ParallelMesh
) -> str | None:
    """Return the canonical name and layer of the tensor where a non-finite gradient arose; None: all are finite.

    Backward propagates a non-finite value towards the embedding, so it arose in the last tensor, in forward order,
    whose gradient is not finite. Collective over the world.
    """
    found: list[tuple[float, int, str]] = []
    for index, parameter in enumerate(parameters):
        gradient = tensors[parameter.name].grad
        # The embedding and what is common to the layers' prefixes come before all layers, the final norm and head after
        # them; a tied head is the embedding.
        depth = -1.0 if parameter.name == EMBEDDING or parameter.adapter else math.inf
        if gradient is not None and not gradient.isfinite().all():
            name = first_nonfinite_part(parameter, gradient, mesh)
            where = "" if parameter.layer is None else f" (layer {parameter.layer})"
            found.append((depth if parameter.layer is None else parameter.layer, index, name + where))
    gathered = mesh.gather_objects(max(found, default=None)) or []
    last = max((place for place in gathered if place is not None), default=None)
    name = mesh.broadcast_object(last and last[2])
    return name if name is None else str(name)


def first_nonfinite_part(parameter: Parameter, held: Tensor, mesh: ParallelMesh) -> str:
    """Return the name of the first part of a registered parameter in which `held` is not finite.

    held: this rank's shard of the parameter or of its gradient.
    """
    row = 0
    for part, region in parameter.spec.slices(mesh.tp.rank, mesh.tp.size):
        if not held[row : row + region.shape[0]].isfinite().all():
            return part.name
        row += region.shape[0]
    return parameter.name


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply all gradients in place."""
    torch._foreach_mul_([*gradients], factor)


def clip_values(gradients: Sequence[Tensor], *, limit: float) -> None:
    """Bring every element of the gradients into [-limit, limit], in place."""
    torch._foreach_clamp_min_(list(gradients), -limit)
    torch._foreach_clamp_max_(list(gradients), limit)


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that clips gradients of global norm `norm` to `max_norm`; `max_norm` 0: no clipping."""
    if max_norm <= 0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))  # the same epsilon as torch's and DeepSpeed's clipping


def clip_gradients(gradients: Sequence[Tensor], *, norm: float, max_norm: float) -> None:
    """Scale all gradients in place so that their global norm, now `norm`, is at most `max_norm`."""
    factor = clip_factor(norm, max_norm)
    if factor < 1.0:
        scale_gradients(gradients, factor)


def buckets(items: Iterable[T], measure: Callable[[T], tuple[torch.dtype, int]]) -> Iterator[list[T]]:
    """Yield consecutive items of one dtype, about _BUCKET_BYTES together; `measure`: item -> dtype and bytes."""
    bucket: list[T] = []
    dtype, size_bytes = None, 0
    for item in items:
        item_dtype, item_bytes = measure(item)
        if bucket and (size_bytes >= _BUCKET_BYTES or item_dtype != dtype):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(item)
        dtype, size_bytes = item_dtype, size_bytes + item_bytes
    if bucket:
        yield bucket
