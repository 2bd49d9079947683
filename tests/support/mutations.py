"""Faults to plant in production code, each of which must turn the parity test that guards it red."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import megalite.parallel.collectives as collectives
import megalite.parallel.gradients as gradients
import megalite.parallel.layers as layers
import megalite.parallel.pipeline as pipeline
from megalite.model import stages, transformer
from megalite.topology.sharding import Box


def _leave_alone(values: torch.Tensor, axis: Any) -> Callable[[], torch.Tensor]:
    return lambda: values


def _reduce_without_reduce(ctx: Any, partial_sums: torch.Tensor, axis: Any) -> torch.Tensor:
    ctx.mark_dirty(partial_sums)
    return partial_sums


def _normalise_by_own_tokens(batch: Any, mesh: Any) -> float:
    counted = batch.loss_mask.double().masked_fill(batch.labels < 0, 0).sum().item()
    return 1.0 / counted if counted else 0.0


def _skip_one_layer(decode: Callable[..., Any]) -> Callable[..., Any]:
    def decode_fewer(self: Any, *inputs: Any, **arguments: Any) -> Any:
        layers = self.layers
        if len(layers) > 1:
            self.layers = layers[:-1]
        try:
            return decode(self, *inputs, **arguments)
        finally:
            self.layers = layers

    return decode_fewer


def _draw_the_first_shard(normal_box: Callable[..., Any]) -> Callable[..., Any]:
    def alike(seed: int, name: str, box: Box, std: float) -> Any:
        return normal_box(seed, name, Box(tuple(0 for _ in box.offsets), box.shape), std)

    return alike


def _keep_the_last_micro_batch(micro_batches: Callable[..., Any]) -> Callable[..., Any]:
    def last_only(self: Any, count: int) -> Any:
        return micro_batches(self, count)[-1:]

    return last_only


# name -> (object, attribute, what replaces it given the original)
FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "missing all-reduce of column-parallel input gradients": (
        layers,
        "start_all_reduce",
        lambda _: _leave_alone,
    ),
    "missing all-reduce of row-parallel outputs": (
        collectives._Reduce,
        "forward",
        lambda _: staticmethod(_reduce_without_reduce),
    ),
    "tied head counted twice in the norm": (
        gradients,
        "counted_here",
        lambda _: lambda parameter, mesh: parameter.spec.dim is not None or mesh.tp.rank == 0,
    ),
    "replicated norms counted once a tensor rank": (
        gradients,
        "counted_here",
        lambda _: lambda parameter, mesh: len(parameter.spec.stages) < 2 or mesh.at.pp == 0,
    ),
    "loss normalised by the rank's own tokens": (
        pipeline,
        "_token_weight",
        lambda _: _normalise_by_own_tokens,
    ),
    "a dropped layer": (transformer.Chunk, "decode", _skip_one_layer),
    "weights initialised alike on two shards": (stages, "normal_box", _draw_the_first_shard),
    "only the last micro batch kept": (pipeline.StepBatch, "micro_batches", _keep_the_last_micro_batch),
}


@contextmanager
def planted_fault(name: str | None) -> Iterator[None]:
    """Run with the named fault in place; with None, as the code stands."""
    if name is None:
        yield
        return
    target, attribute, replace = FAULTS[name]
    with mock.patch.object(target, attribute, replace(getattr(target, attribute))):
        yield
