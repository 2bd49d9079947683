"""Sums over what the modules of a forward put out, by which a wrong module is found without keeping activations.

Each sum is over the values of one sample, so the sums of ranks that share a sequence add up, in any layout.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megalite.model.layer import DecoderLayer
from megalite.model.transformer import Stage
from megalite.parallel.step_batch import TRAINING, StepBatch

Outputs = dict[str, dict[int, list[float]]]
"""Module -> sample -> the sum of squares, and the sum with weights of alternating size, of its output's values."""


@contextmanager
def recorded_outputs(stage: Stage) -> Iterator[Outputs]:
    """Yield the sums of each forward of training inside of the `with` block, which recomputed ones do not change."""
    outputs: Outputs = defaultdict(dict)
    batch: list[StepBatch] = []

    def enter(chunk: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        batch[:] = [named["batch"]] if named.get("mode", TRAINING).training else []

    def leave(site: str, output: Any) -> None:
        # Inside of a backward a forward is recomputed.
        if batch and torch._C._current_graph_task_id() == -1 and isinstance(output, Tensor):
            _add(outputs[site], batch[0].sample_indices.tolist(), output.detach())

    hooks = [chunk.register_forward_pre_hook(enter, with_kwargs=True) for chunk in stage.chunks]
    for site, module in _sites(stage):
        hooks.append(module.register_forward_hook(lambda _, inputs, output, site=site: leave(site, output)))
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _sites(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of the blocks of each layer; of compiled ones the layer alone."""
    for name, layer in stage.model.layers.items():
        assert isinstance(layer, DecoderLayer)
        if not layer.compile_layer:
            yield f"model.layers.{name}.self_attn", layer.self_attn
            yield f"model.layers.{name}.mlp", layer.mlp
        yield f"model.layers.{name}", layer
    for chunk in stage.chunks:
        if chunk.is_first:
            yield "model.embed_tokens", chunk.embedding


def _add(sums: dict[int, list[float]], samples: list[int], output: Tensor) -> None:
    """Add the sums of an output [b, s, H]; a block that works on parts of a sequence comes several times."""
    values = output.double()
    weights = torch.arange(values.shape[-1], device=values.device, dtype=torch.float64).cos()
    squares, weighted = values.square().sum(dim=(1, 2)), (values * weights).sum(dim=(1, 2))
    for sample, square, sum_ in zip(samples, squares.tolist(), weighted.tolist(), strict=True):
        before = sums.get(sample, [0.0, 0.0])
        sums[sample] = [before[0] + square, before[1] + sum_]
