"""Gradients after the pipeline: sums over tensor-parallel copies and tied weights, the norm and its clipping."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from megalite.ops.choice import PLAIN_TORCH, Operators
from megalite.parallel.collectives import all_reduce, broadcast
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.topology.collective_sizes import COLLECTIVE_BYTES
from megalite.topology.parameters import EMBEDDING, Parameter
from megalite.topology.sharding import Part

T = TypeVar("T")


@dataclass(frozen=True)
class _Share:
    """This rank's copy of elements of a weight or gradient that several of `ranks` hold.

    start: the elements' offset in the flattened canonical tensor; total: that tensor's size. first: whether this rank
    is the first holder; true on every rank if all ranks hold the whole tensor.
    """

    values: Tensor
    start: int
    total: int
    first: bool
    ranks: RankGroup


def all_reduce_replicated_gradients(
    parameters: Sequence[Parameter], tensors: Mapping[str, Tensor], mesh: ParallelMesh
) -> None:
    """Sum, once a step and before the sum over its copies, the partial gradients of weights that several ranks hold.

    Over the axis of its ShardSpec: weights that each rank holds whole but uses for its own positions or heads only, and
    key-value heads that ranks share (all ranks but the first then hold zeros as their gradient, so that every norm
    counts it once). Over the stages that hold a copy: tied weights. Collective over both.
    """

    def gradient(parameter: Parameter) -> Tensor:
        values = tensors[parameter.name].grad
        if values is None:
            raise AssertionError(f"{parameter.name} has no gradient: the stage that holds it did not use it")
        return values

    concerned = [each for each in parameters if _is_partial(each, mesh)]
    _add_up([share for each in concerned for share in _shares(each, gradient(each), mesh)])
    for parameter in parameters:
        if len(parameter.spec.stages) > 1:
            all_reduce(gradient(parameter), mesh.tied_over(parameter.spec.stages))


def all_reduce_replicated_in_backward(
    parameters: Sequence[Parameter], tensors: Mapping[str, Tensor], mesh: ParallelMesh
) -> None:
    """Make every backward sum replicated gradients: one collective for each weight, instead of once a step.

    For an optimizer that takes gradients away in backward (ZeRO 2 and 3), which has one pipeline stage.
    """

    def complete(parameter: Parameter, incomplete: Tensor) -> Tensor:
        gradient = incomplete.clone(memory_format=torch.contiguous_format)
        _add_up([*_shares(parameter, gradient, mesh)])
        return gradient

    for parameter in parameters:
        if _is_partial(parameter, mesh):
            tensors[parameter.name].register_hook(partial(complete, parameter))


def is_partial(parameter: Parameter, part: Part, mesh: ParallelMesh) -> bool:
    """Return whether backward leaves each rank of the parameter's axis with a partial gradient of a replicated part."""
    spec = parameter.spec
    whole = spec.dim is None and mesh.cut_over(parameter).size > 1 and (spec.summed or mesh.sequence_parallel)
    return whole or mesh.is_shared(parameter, part)


def waits_for_other_ranks(parameter: Parameter, mesh: ParallelMesh) -> bool:
    """Return whether `all_reduce_replicated_gradients` completes the gradient of this parameter."""
    return len(parameter.spec.stages) > 1 or _is_partial(parameter, mesh)


def _is_partial(parameter: Parameter, mesh: ParallelMesh) -> bool:
    return any(is_partial(parameter, part, mesh) for part in parameter.spec.parts)


def sync_tied_weights(
    parameters: Sequence[Parameter], tensors: Mapping[str, Tensor], mesh: ParallelMesh
) -> None:
    """Overwrite all copies of a tied weight with the first stage's copy, and of a shared head with the first rank's.

    Tied copies see the same gradient, but reductions round by an element's place in a buffer, which differs
    between stages: without this they would drift apart by a last digit a step. Collective over the parameters' axes
    and the stages that hold copies.
    """
    shared = [each for each in parameters if any(mesh.is_shared(each, part) for part in each.spec.parts)]
    shares = [share for each in shared for share in _shares(each, tensors[each.name].data, mesh)]
    for share, total in _sums(shares, of_first=True):
        share.values.copy_(total)
    for parameter in parameters:
        if len(parameter.spec.stages) > 1:
            broadcast(tensors[parameter.name].data, mesh.tied_over(parameter.spec.stages), 0)


def _shares(parameter: Parameter, tensor: Tensor, mesh: ParallelMesh) -> Iterator[_Share]:
    for part, region, values in mesh.parts_of(parameter, tensor):
        if is_partial(parameter, part, mesh):
            first = parameter.spec.dim is None or mesh.is_first_holder(parameter, part)
            start = region.offsets[0] * prod(part.shape[1:])
            yield _Share(values, start, prod(part.shape), first, mesh.cut_over(parameter))


def _add_up(shares: Sequence[_Share]) -> None:
    """Set the first copy of each gradient to the sum of all copies, and the other copies to zero."""
    for share, total in _sums(shares):
        if share.first:
            share.values.copy_(total)
        else:
            share.values.zero_()


def _sums(shares: Sequence[_Share], *, of_first: bool = False) -> Iterator[tuple[_Share, Tensor]]:
    """Yield each share with the sum of all copies of its elements (of_first: with the first copy).

    One collective for each bucket.
    """

    def measure(share: _Share) -> tuple[Hashable, int]:
        return (share.ranks.ranks, share.values.dtype), share.total * share.values.element_size()

    for bucket in buckets(shares, measure):
        places = [*accumulate((share.total for share in bucket), initial=0)]
        flat = bucket[0].values.new_zeros(places[-1])
        sums = [
            flat[place + share.start :][: share.values.numel()].view(share.values.shape)
            for place, share in zip(places[:-1], bucket, strict=True)
        ]
        for share, elements in zip(bucket, sums, strict=True):
            if share.first or not of_first:
                elements.copy_(share.values)
        all_reduce(flat, bucket[0].ranks)
        yield from zip(bucket, sums, strict=True)


def squared_norm_share(
    parameters: Sequence[Parameter],
    tensors: Mapping[str, Tensor],
    mesh: ParallelMesh,
    *,
    ops: Operators = PLAIN_TORCH,
) -> Tensor:
    """Return this rank's share of the squared L2 norm of the whole model's gradient, [] float64 on the mesh's device.

    The shares of all ranks sum to it; every element counts once. The gradients are summed over their copies already.
    """
    gradients = ((parameter, tensors[parameter.name].grad) for parameter in parameters)
    counted = (
        (0, mesh.copies(parameter).size, gradient)
        for parameter, gradient in gradients
        if gradient is not None and mesh.is_counted(parameter)
    )
    return squared_norm_shares(counted, 1, mesh.device, ops=ops)[0]


def squared_norm_shares(
    counted: Iterable[tuple[int, int, Tensor]],
    norms: int,
    device: torch.device,
    *,
    ops: Operators = PLAIN_TORCH,
) -> Tensor:
    """Return this rank's shares of several squared L2 norms, [norms] float64 on `device`.

    counted: the values that this rank counts: index of the norm, number of ranks that count the same values, values.
    """
    same: dict[tuple[int, int], list[Tensor]] = {}
    for index, copies, values in counted:
        same.setdefault((index, copies), []).append(values)
    shares = torch.zeros(norms, dtype=torch.float64, device=device)
    for (index, copies), tensors in same.items():
        shares[index] += ops.sum_of_squares(tensors).to(device) / copies
    return shares


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
    nonfinite: list[tuple[float, int, str]] = []
    for index, parameter in enumerate(parameters):
        gradient = tensors[parameter.name].grad
        # The embedding and what is common to the layers' prefixes come before all layers, the final norm and head after
        # them; a tied head is the embedding.
        depth = -1.0 if parameter.name == EMBEDDING or parameter.adapter else math.inf
        if gradient is not None and not gradient.isfinite().all():
            name = first_nonfinite_part(parameter, gradient, mesh)
            where = "" if parameter.layer is None else f" (layer {parameter.layer})"
            nonfinite.append((depth if parameter.layer is None else parameter.layer, index, name + where))
    gathered = mesh.gather_objects(max(nonfinite, default=None)) or []
    last = max((place for place in gathered if place is not None), default=None)
    name = mesh.broadcast_object(last and last[2])
    return name if name is None else str(name)


def first_nonfinite_part(parameter: Parameter, tensor: Tensor, mesh: ParallelMesh) -> str:
    """Return the name of the first part of a registered parameter in which `tensor` is not finite.

    tensor: this rank's shard of the parameter or of its gradient.
    """
    parts = mesh.parts_of(parameter, tensor)
    return next((part.name for part, _, values in parts if not values.isfinite().all()), parameter.name)


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


def buckets(items: Iterable[T], measure: Callable[[T], tuple[Hashable, int]]) -> Iterator[list[T]]:
    """Yield consecutive items, about COLLECTIVE_BYTES together.

    measure: item -> what is the same for a bucket, as dtype and ranks are, and bytes.
    """
    bucket: list[T] = []
    same, size_bytes = None, 0
    for item in items:
        item_same, item_bytes = measure(item)
        if bucket and (size_bytes >= COLLECTIVE_BYTES or item_same != same):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(item)
        same, size_bytes = item_same, size_bytes + item_bytes
    if bucket:
        yield bucket
