"""Ring attention on a few ranks, against one process's attention over the whole sequences."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.ops.attention import causal_attention
from megalite.ops.attention_form import AttentionForm
from megalite.ops.context_ring import AttentionBlock, BlockForm
from megalite.ops.documents import CuSeqlens
from megalite.ops.dropout import CountedMask
from megalite.parallel import context_ring
from megalite.parallel.context_ring import ring_attention
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.topology.axes import Layout
from megalite.topology.context import zig_zag
from tests.support.attention import counted_mask

# Documents of any length: of one position, of a whole row, across blocks, and ending where a block does.
DOCUMENTS = ((5, 1, 13, 8, 5), (32,))
Replace = Callable[[Any], Any]


@dataclass(frozen=True)
class RingCase:
    """Attention of `rows` sequences of `length` positions; documents: the lengths of each row's documents."""

    compiled: bool = False
    rows: int = 2
    length: int = 32
    heads: int = 4
    kv_heads: int = 2
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] = ()
    dropout: bool = False
    scale: float | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float64

    @property
    def form(self) -> AttentionForm:
        mask = counted_mask(self.rows, self.heads) if self.dropout else None
        documents = None
        if self.documents:
            lengths = [length for row in self.documents for length in row]
            documents = CuSeqlens(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), max(lengths))
        return AttentionForm(self.window, documents, mask, self.scale, self.softcap)

    def tensors(self) -> list[Tensor]:
        """Return query, key, value and the output's gradient, of whole sequences."""
        drawn = torch.Generator().manual_seed(5)
        shapes = [
            (self.rows, self.length, heads, 8) for heads in (self.heads, *[self.kv_heads] * 2, self.heads)
        ]
        return [torch.randn(shape, dtype=torch.float64, generator=drawn).to(self.dtype) for shape in shapes]

    def attend_alone(self, dtype: torch.dtype) -> list[Tensor]:
        """Return output and gradients of one process that computes in `dtype`."""
        *heads, grad = (each.to(dtype) for each in self.tensors())
        heads = [each.requires_grad_() for each in heads]
        output = causal_attention(*heads, self.form)
        return [output.detach(), *torch.autograd.grad(output, heads, grad)]


def positions(rank: int, size: int, length: int) -> Tensor:
    """Return the positions of a rank's tokens."""
    blocks = torch.arange(length).view(2 * size if size > 1 else 1, -1)
    return blocks[list(zig_zag(size)[rank])].flatten()


def ring_on_rank(cases: list[RingCase]) -> list[list[Tensor]]:
    """Return this rank's output and gradients in each case."""
    mesh = ParallelMesh.over_world(Layout(context=dist.get_world_size()))
    return [_attend(case, mesh.cp_ring) for case in cases]


def traffic_on_rank(case: RingCase) -> int:
    """Return the number of elements that this rank sends in a forward and a backward."""
    mesh = ParallelMesh.over_world(Layout(context=dist.get_world_size()))
    with _counted() as elements:
        _attend(case, mesh.cp_ring)
    return sum(elements)


def faulty_on_rank(cases: list[RingCase]) -> list[list[Tensor]]:
    """Return this rank's output and gradients in each case with the fault of the same place in RING_FAULTS."""
    mesh = ParallelMesh.over_world(Layout(context=dist.get_world_size()))
    results = []
    for (_, faults), case in zip(RING_FAULTS.values(), cases, strict=True):
        changed = {name: change(getattr(context_ring, name)) for name, change in faults.items()}
        with mock.patch.multiple(context_ring, **changed):
            results.append(_attend(case, mesh.cp_ring))
    return results


def _attend(case: RingCase, ranks: RankGroup) -> list[Tensor]:
    place = positions(ranks.rank, ranks.size, case.length)
    *heads, grad = (each[:, place] for each in case.tensors())
    heads = [each.requires_grad_() for each in heads]
    output = ring_attention(*heads, None, BlockForm(case.form, case.rows, case.length, case.compiled), ranks)
    return [output.detach(), *torch.autograd.grad(output, heads, grad)]


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the elements that this rank sends."""
    elements: list[int] = []
    batched = dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        elements.extend(each.tensor.numel() for each in operations if each.op is dist.isend)
        return batched(operations)

    with mock.patch.object(dist, "batch_isend_irecv", counting):
        yield elements


# --------------------------------------------------------------------------------------------------- planted faults


def _keep_the_last_gradients(start_rotation: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out the last of the 3 c - 2 rotations: gradients end on the rank before their keys' own."""
    rotations = 0

    def start(values: Tensor, ranks: RankGroup) -> Callable[[], Tensor]:
        nonlocal rotations
        rotations += 1
        return start_rotation(values, ranks) if rotations < 3 * ranks.size - 2 else lambda: values

    return start


def _add_without_weights(_: Any) -> Callable[..., None]:
    def add(output: Tensor, lse: Tensor, block_output: Tensor, block_lse: Tensor) -> None:
        output.add_(block_output)
        lse.copy_(torch.logaddexp(lse, block_lse))

    return add


def _own_delta(block_gradients: Callable[..., Any]) -> Callable[..., Any]:
    def gradients(grad: Tensor, heads: Any, results: Any, *others: Any) -> Any:
        own, _ = context_ring.attend_block(*heads, *others)
        return block_gradients(grad, heads, (own, results[1]), *others)

    return gradients


def _with(
    change: Callable[[AttentionBlock, BlockForm], tuple[AttentionBlock, BlockForm]],
) -> Mapping[str, Replace]:
    """Change the block and the form of each call, in the forward and the backward."""

    def changed(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: function(*inputs[:-2], *change(*inputs[-2:]))

    return {"attend_block": changed, "block_gradients": changed}


def _see_all_on_the_diagonal(block: AttentionBlock, form: BlockForm) -> tuple[AttentionBlock, BlockForm]:
    queries, keys = block
    behind = range(queries.start + len(keys), queries.stop + len(keys))
    return (AttentionBlock(behind, keys) if queries == keys else block), form


def _ignore_documents_off_the_diagonal(
    block: AttentionBlock, form: BlockForm
) -> tuple[AttentionBlock, BlockForm]:
    free = replace(form, form=form.form._replace(documents=None))
    return block, form if block.queries == block.keys else free


def _measure_the_window_within_blocks(
    block: AttentionBlock, form: BlockForm
) -> tuple[AttentionBlock, BlockForm]:
    return AttentionBlock(*(range(len(each)) for each in block)), form


class _LocalMask(CountedMask):
    def draw_block(self, queries: range, keys: range) -> Any:
        return super().draw_block(*(range(len(each)) for each in (queries, keys)))


def _drop_by_local_positions(block: AttentionBlock, form: BlockForm) -> tuple[AttentionBlock, BlockForm]:
    return block, replace(form, form=form.form._replace(mask=_LocalMask(*form.form.mask)))


RING_FAULTS: dict[str, tuple[RingCase, Mapping[str, Replace]]] = {
    "gradients without the last rotation": (RingCase(), {"start_rotation": _keep_the_last_gradients}),
    "blocks added without their weights": (RingCase(), {"merge_block": _add_without_weights}),
    "delta of a block's own output": (RingCase(), {"block_gradients": _own_delta}),
    "diagonal block not causal": (RingCase(), _with(_see_all_on_the_diagonal)),
    "documents ignored off the diagonal": (
        RingCase(documents=DOCUMENTS),
        _with(_ignore_documents_off_the_diagonal),
    ),
    "window measured within a block": (RingCase(window=7), _with(_measure_the_window_within_blocks)),
    "dropout by local positions": (RingCase(dropout=True), _with(_drop_by_local_positions)),
}
"""Fault -> a case that shows it, and name in parallel/context_ring.py -> what replaces it."""
