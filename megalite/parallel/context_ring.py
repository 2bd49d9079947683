"""Ring attention over the context-parallel ranks (Liu et al., "Ring attention with blockwise transformers", 2023).

Keys and values go from rank to rank, in one message to the next rank while this one computes with those that it has;
the results are merged by their log-sum-exps (ops/context_ring.py). The blocks of a sequence are in zig-zag order
(topology/context.py), so that all ranks compute equally much in each step.

The whole ring is one autograd node, which saves its inputs, output and log-sum-exp. Ranks skip different blocks, and a
node a block would save different numbers of tensors: a recomputed region, which ends once all that was saved is there
again, would end between other messages on another rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.launcher.control.progress import progress
from megalite.ops.attention_sinks import only_sinks, sink_gradients
from megalite.ops.context_ring import AttentionBlock, BlockForm, attend_block, block_gradients, merge_block
from megalite.parallel.collectives import Pending
from megalite.parallel.mesh import RankGroup
from megalite.topology.context import zig_zag


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, form: BlockForm, ranks: RankGroup
) -> Tensor:
    """Return causal attention of this rank's queries to the keys of all ranks: [B, S / c, heads, D].

    query: [B, S / c, heads, D]; key, value: [B, S / c, kv heads, D]; the rank's two blocks of each sequence, one after
    the other. sinks: [heads], as in `AttentionForm`. form: that of whole sequences of S positions, without them.
    ranks: in a process group for these messages alone.

    Each rank sends (3 c - 2) times its keys and values in a forward and a backward: c of these are their gradients,
    which travel in float32 at least.
    """
    attended: Tensor = _RingAttention.apply(query, key, value, sinks, _Ring(ranks, form))  # type: ignore[no-untyped-call]
    return attended


class _Run(NamedTuple):
    """Blocks of a rank that follow each other in the sequence: where in the rank's tensors, and their positions."""

    place: slice
    positions: range


@dataclass(frozen=True)
class _Ring:
    ranks: RankGroup
    form: BlockForm

    def runs(self, rank: int) -> list[_Run]:
        """Return all runs of a rank; two blocks that follow each other are one, and one call of attention."""
        blocks = zig_zag(self.ranks.size)[rank]
        size = self.form.length // (self.ranks.size * len(blocks))
        cuts = [0, *(i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1), len(blocks)]
        return [
            _Run(slice(begin * size, end * size), range(blocks[begin] * size, (blocks[end - 1] + 1) * size))
            for begin, end in pairwise(cuts)
        ]

    def steps(self) -> Iterator[list[tuple[slice, slice, AttentionBlock]]]:
        """Yield, for each step, the pairs to compute: slices of this rank's queries and of its guest keys, and both."""
        rank, size = self.ranks.rank, self.ranks.size
        for step in range(size):
            guests = self.runs((rank - step) % size)
            pairs = [
                (own.place, guest.place, AttentionBlock(own.positions, guest.positions))
                for own in self.runs(rank)
                for guest in guests
            ]
            yield [pair for pair in pairs if self.form.sees(pair[2])]


def start_rotation(values: Tensor, ranks: RankGroup) -> Pending:
    """Start to send contiguous `values` to the next rank; the result waits for those of the previous one."""
    arriving = torch.empty_like(values)
    following, previous = (ranks.ranks[(ranks.rank + way) % ranks.size] for way in (1, -1))
    progress.collective("rotate", ranks.role)
    # One call, or NCCL makes a communicator for each pair of ranks, lazily and one after another.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, values, following, ranks.group),
            dist.P2POp(dist.irecv, arriving, previous, ranks.group),
        ]
    )

    def finish(_: Tensor = values) -> Tensor:  # the message is read until then
        with progress.wait(ranks.role):
            for work in works:
                work.wait()
        return arriving

    return finish


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: _Ring
    ) -> Tensor:
        output, lse = only_sinks(query, sinks)
        guests = torch.stack((key, value))
        for step, pairs in enumerate(ring.steps(), start=1):
            arriving = start_rotation(guests, ring.ranks) if step < ring.ranks.size else None
            for own, guest, block in pairs:
                keys, values = guests[:, :, guest]
                results = attend_block(query[:, own], keys, values, block, ring.form)
                merge_block(output[:, own], lse[:, :, own], *results)
            if arriving is not None:
                guests = arriving()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        query_grad = query.new_zeros(query.shape, dtype=lse.dtype)
        guests, returning = torch.stack((key, value)), None
        for step, pairs in enumerate(ring.steps(), start=1):
            arriving = start_rotation(guests, ring.ranks) if step < ring.ranks.size else None
            sums = guests.new_zeros(guests.shape, dtype=lse.dtype)
            for own, guest, block in pairs:
                keys, values = guests[:, :, guest]
                results = output[:, own], lse[:, :, own]
                grads = block_gradients(
                    output_grad[:, own], (query[:, own], keys, values), results, block, ring.form
                )
                query_grad[:, own] += grads[0]
                sums[0, :, guest] += grads[1]
                sums[1, :, guest] += grads[2]
            # The sums of these keys' gradients on earlier ranks arrive a step behind the keys.
            if returning is not None:
                sums += returning()
            returning = start_rotation(sums, ring.ranks)
            if arriving is not None:
                guests = arriving()
        assert returning is not None
        key_grad, value_grad = returning()
        of_sinks = None if sinks is None else sink_gradients(output_grad, (output, lse), sinks)
        return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype), of_sinks, None
