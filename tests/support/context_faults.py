"""Faults of context parallelism to plant, each with the settings of a `Job` on two context ranks that show it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.model import attention, dropout
from megalite.ops import dropout as counted
from megalite.parallel import context, context_attention, context_ring, mesh, pipeline
from megalite.parallel.objective import Preference
from megalite.parallel.step_batch import StepBatch
from megalite.topology import place
from megalite.topology.place import RankPlace
from megalite.train import loaders
from tests.support.options import NO_DROPOUT, Recompute
from tests.support.training import SEQUENCES

# Four layers with one micro batch make one call each in the forward: this is the first call of the backward.
RECOMPUTED_CALL = 5


@dataclass(frozen=True)
class ContextFault:
    """`target.attribute` is replaced by `replace(original)`; changes: of the job that shows it."""

    target: Any
    attribute: str
    replace: Callable[[Any], Any]
    changes: Mapping[str, Any]


def _cut_with(name: str, values: Callable[[StepBatch, StepBatch], Tensor]) -> Callable[[Any], Any]:
    """Cut a batch with one tensor of its own, from the whole and from the cut batch."""

    def of(cut: Any) -> Any:
        def changed(batch: StepBatch, mesh: Any) -> StepBatch:
            own = cut(batch, mesh)
            return replace(own, **{name: values(batch, own)})

        return changed

    return of


def _without_order(_: Any) -> Any:
    return property(lambda rows: torch.arange(rows.table.numel(), device=rows.table.device))


def _shifted(documents_of_block: Any) -> Any:
    def shifted(documents: Tensor, *others: Any, first: int) -> Tensor:
        mask: Tensor = documents_of_block(documents.roll((1, 1), dims=(2, 3)).tril(), *others, first=first)
        return mask

    return shifted


def _seen_off_the_diagonal(documents_of_block: Any) -> Any:
    def seen(documents: Tensor, length: int, block: range, prefix: int, *, first: int) -> Tensor:
        mask: Tensor = documents_of_block(documents, length, block, prefix, first=first).clone()
        mask[..., : block.start - first] = True
        return mask

    return seen


def _of_first_queries(keep_probabilities: Any) -> Any:
    def local(key: Any, samples: Tensor, heads: range, queries: range, keys: range, **rest: Any) -> Any:
        return keep_probabilities(key, samples, heads, range(len(queries)), keys, **rest)

    return local


def _of_first_positions(keep_mask: Any) -> Any:
    def local(seed: int, name: str, samples: Tensor, positions: Tensor, *others: Any, **rest: Any) -> Any:
        return keep_mask(seed, name, samples, range(positions.shape[1]), *others, **rest)

    return local


def _of_first_heads(methods: Any) -> Any:
    def ulysses(ops: Any, *tensors: Tensor, form: Any, rows: Any) -> Tensor:
        def of_first(*inputs: Any) -> Any:
            *own, local = inputs
            heads = range(len(local.mask.heads))
            return ops.attend(*own, local._replace(mask=local.mask._replace(heads=heads)))

        attending = SimpleNamespace(attend=of_first)
        return context_attention.ulysses_attention(attending, *tensors, form=form, rows=rows)

    return {**methods, "ulysses": ulysses}


def _as_contiguous_shares(_: Any) -> Any:
    def to_tokens(rows: Any, values: Tensor) -> Tensor:
        by_rank = values.unflatten(1, (rows.ranks.size, -1)).movedim(1, 0)
        return context.all_to_all(by_rank, rows.ranks).movedim(0, 2).flatten(2, 3)

    return to_tokens


def _without_a_recomputed_rotation(ring_attention: Any) -> Any:
    """On rank 1 the recomputed forward of the last layer sends nothing, and takes its own keys for the other's."""
    calls = 0

    def attend(query: Tensor, *others: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls != RECOMPUTED_CALL or dist.get_rank() != 1:
            return cast(Tensor, ring_attention(query, *others))
        with mock.patch.object(context_ring, "start_rotation", lambda values, ranks: lambda: values):
            return cast(Tensor, ring_attention(query, *others))

    return attend


def _of_all_ranks(share: Any) -> Any:
    def of_all(length: int, rows: int, micro_batches: int, *_: int) -> Any:
        return share(length, rows, micro_batches, dist.get_rank(), dist.get_world_size())

    return of_all


_ULYSSES = {"context_method": "ulysses"}
CONTEXT_FAULTS: dict[str, ContextFault] = {
    "positions begin anew on each rank": ContextFault(
        pipeline,
        "cut",
        _cut_with("position_ids", lambda whole, own: whole.position_ids[:, : own.labels.shape[1]]),
        {"documents": False},
    ),
    "labels are the next local tokens": ContextFault(
        pipeline, "cut", _cut_with("labels", lambda whole, own: own.input_ids.roll(-1, dims=1)), {}
    ),
    "loss mask of the first share": ContextFault(
        pipeline,
        "cut",
        _cut_with("loss_mask", lambda whole, own: whole.loss_mask[:, : own.labels.shape[1]]),
        {},
    ),
    "tokens counted by every context rank": ContextFault(
        RankPlace, "counts_samples", lambda _: property(lambda place: place.counts_loss), {}
    ),
    "gradients summed over dp only": ContextFault(mesh, "COPIES", lambda _: {"tp": "batch"}, {}),
    "keys in the order of ranks": ContextFault(context.ContextRows, "order", _without_order, {}),
    "documents shifted by a token": ContextFault(context_attention, "documents_of_block", _shifted, {}),
    "documents ignored off the diagonal": ContextFault(
        context_attention, "documents_of_block", _seen_off_the_diagonal, {}
    ),
    "attention dropout by local positions": ContextFault(
        counted, "keep_probabilities", _of_first_queries, {}
    ),
    "residual dropout by local positions": ContextFault(dropout, "keep_mask", _of_first_positions, {}),
    "masks of the first heads": ContextFault(attention, "METHODS", _of_first_heads, _ULYSSES),
    "tokens back as contiguous shares": ContextFault(
        context.ContextRows, "to_tokens", _as_contiguous_shares, _ULYSSES
    ),
    "preferences of a part of each row": ContextFault(
        pipeline,
        "reduce_from",
        lambda _: lambda values, ranks: values,
        {"objective": Preference(beta=2.0), "micro_batch_size": 2},
    ),
}

# Each is planted by the test named: not every fault is one of numbers that a single step shows.
FAULTS_ELSEWHERE: dict[str, ContextFault] = {
    # tests/parity/test_context_ring.py
    "recompute without a rotation": ContextFault(
        context_attention,
        "ring_attention",
        _without_a_recomputed_rotation,
        {"recompute": Recompute("full"), "micro_batch_size": SEQUENCES, "dropout": NO_DROPOUT},
    ),
    # tests/distributed/test_context_data.py
    "other samples on each context rank": ContextFault(loaders, "BatchShare", _of_all_ranks, {}),
    # tests/distributed/test_checkpoint.py
    "checkpoint written by every context rank": ContextFault(place, "COPIES", lambda _: {"tp": "batch"}, {}),
}


@contextmanager
def planted_context_fault(
    name: str | None, faults: Mapping[str, ContextFault] = {**CONTEXT_FAULTS, **FAULTS_ELSEWHERE}
) -> Iterator[None]:
    """Run with the named fault of a table planted; None: without a fault."""
    if name is None:
        yield
        return
    fault = faults[name]
    original = vars(fault.target)[fault.attribute]
    with mock.patch.object(fault.target, fault.attribute, fault.replace(original)):
        yield
