"""Sums gradients over the copies of their weights in buckets, each as soon as its gradients are complete.

As torch's DistributedDataParallel does (Li et al. 2020), at the moment that FSDP2 chooses: a layer's gradients are
complete once the gradient of its input is.
"""

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel.collectives import Pending, start_all_reduce
from megalite.parallel.gradients import buckets
from megalite.parallel.mesh import RankGroup
from megalite.topology.collective_sizes import BUCKET_BYTES, COLLECTIVE_BYTES

# While `kept_before_sums` is open: id of a parameter -> its gradient before its sum.
_kept: dict[int, Tensor] | None = None
# Sums in another type that may be under way: each holds a converted copy of its gradients until its end.
_MOST_CONVERTED = 4


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Parameters of consecutive layers, whose gradients are complete together."""

    tensors: tuple[nn.Parameter, ...]


class GradientBuckets:
    """The sums of one rank's gradients over the ranks with the same weights.

    Once a sum has started, `.grad` is a view of its bucket; gradients are read again after `finish`.
    """

    def __init__(
        self,
        chunks: Mapping[int, Sequence[nn.Module]],
        copies: Mapping[nn.Parameter, RankGroup],
        late: Collection[nn.Parameter],
        *,
        uneven: Collection[nn.Parameter] = (),
        bucket_bytes: int = 0,
        dtype: torch.dtype | None = None,
    ):
        """
        chunks: chunk -> its layers in forward order; a layer's first argument is its hidden states.
        copies: parameter of the rank -> the ranks with the same shard. late: the parameters that other ranks' parts are
        added to before `finish`. bucket_bytes: of the weights of a bucket, at least; 0: about DDP's.
        Above COLLECTIVE_BYTES, into which larger ones are cut anyway, a bucket would only start later.
        uneven: those of other sizes on other ranks, which the size of a bucket leaves out: ranks with the same dense
        weights must sum the same ones together.
        dtype: the type in which gradients are summed; by default their own.
        """
        self._copies, self._dtype = copies, dtype
        self._bucket_bytes = min(bucket_bytes or BUCKET_BYTES, COLLECTIVE_BYTES)
        self._watched = False
        self._pending = deque[Pending]()
        self._started: set[_Bucket] = set()
        self._uneven = {id(tensor) for tensor in uneven}
        kept_back = {id(tensor) for tensor in late}
        self._chunks = {chunk: [*self._fill(layers, kept_back)] for chunk, layers in chunks.items()}

    @contextmanager
    def last_forward(self) -> Iterator[None]:
        """Run the forward whose backward completes the gradients of its chunk: sums then start during that backward."""
        self._watched = True
        try:
            yield
        finally:
            self._watched = False

    def chunk_complete(self, chunk: int) -> None:
        """Start the sums of a chunk's layers that have not started. Collective over the copies."""
        for bucket in self._chunks[chunk]:
            self._start(bucket)

    def finish(self) -> None:
        """Start the sums of all other gradients, and wait for all sums. Collective over the copies."""
        begun = {id(tensor) for bucket in self._started for tensor in bucket.tensors}
        rest = [each for each in self._copies if id(each) not in begun]
        start_sums(rest, self._copies, self._pending, self._dtype)
        _finish_all_but(0, self._pending)
        self._started.clear()

    def _fill(self, layers: Sequence[nn.Module], kept_back: Collection[int]) -> Iterator[_Bucket]:
        """Yield buckets from the last layer to the first, and have the lowest layer of each start it."""
        gathered: list[nn.Parameter] = []
        for layer in reversed(layers):
            gathered += [each for each in layer.parameters() if id(each) not in kept_back]
            counted = (each for each in gathered if id(each) not in self._uneven)
            full = sum(each.numel() * each.element_size() for each in counted) >= self._bucket_bytes
            if gathered and (full or layer is layers[0]):
                bucket = _Bucket(tuple(gathered))
                layer.register_forward_pre_hook(partial(self._enter, bucket))
                yield bucket
                gathered = []

    def _enter(self, bucket: _Bucket, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Have the gradient of a layer's hidden states start the bucket's sum."""
        hidden_states = inputs[0]
        # A leaf's gradient may come before those of the norm that reads the leaf: `chunk_complete` starts the sum.
        if self._watched and hidden_states.grad_fn is not None:
            hidden_states.register_hook(lambda _: self._start(bucket))

    def _start(self, bucket: _Bucket) -> None:
        if bucket not in self._started:
            self._started.add(bucket)
            start_sums(bucket.tensors, self._copies, self._pending, self._dtype)


@contextmanager
def kept_before_sums() -> Iterator[dict[int, Tensor]]:
    """Yield id of a parameter -> a float64 copy of its gradient as it was before its sum over the ranks started."""
    global _kept
    _kept = {}
    try:
        yield _kept
    finally:
        _kept = None


@torch.no_grad()
def start_sums(
    tensors: Iterable[nn.Parameter],
    copies: Mapping[nn.Parameter, RankGroup],
    pending: deque[Pending],
    dtype: torch.dtype | None = None,
) -> None:
    """Start the sums of the gradients over `copies`; `.grad` becomes a view of the buffer that holds the sum.

    pending: gets the sums; a sum in another type first finishes all but the newest few of them.
    dtype: the type in which they are summed; by default their own.
    """

    tensors = [*tensors]
    if _kept is not None:
        _kept.update(
            {id(each): each.grad.to(torch.float64, copy=True) for each in tensors if each.grad is not None}
        )

    def measure(item: tuple[nn.Parameter, Tensor]) -> tuple[Hashable, int]:
        tensor, gradient = item
        return (copies[tensor].ranks, gradient.dtype), gradient.numel() * gradient.element_size()

    # Frozen parameters have neither gradient nor copies.
    gradients = [(each, each.grad) for each in tensors if each.grad is not None and copies[each].size > 1]
    for bucket in buckets(gradients, measure):
        flat = torch.cat([gradient.reshape(-1) for _, gradient in bucket])
        parts = flat.split([gradient.numel() for _, gradient in bucket])
        for (tensor, _), part in zip(bucket, parts, strict=True):
            tensor.grad = part.view_as(tensor)
        if dtype not in (None, flat.dtype):
            _finish_all_but(_MOST_CONVERTED - 1, pending)
        pending.append(_start_sum(flat, copies[bucket[0][0]], dtype or flat.dtype))


def _finish_all_but(newest: int, pending: deque[Pending]) -> None:
    while len(pending) > newest:
        pending.popleft()()


def _start_sum(flat: Tensor, ranks: RankGroup, dtype: torch.dtype) -> Pending:
    """Start the sum of `flat` over the ranks in `dtype`, in place."""
    if flat.dtype == dtype:
        return start_all_reduce(flat, ranks)
    finish = start_all_reduce(flat.to(dtype), ranks)
    return lambda: flat.copy_(finish())
