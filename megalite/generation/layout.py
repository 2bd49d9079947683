"""The rules over a layout that a model computes in without training. No torch."""

from collections.abc import Iterator

from megalite.errors import Problem
from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import tensor_sizes


def layout_problems(layout: Layout, shape: ModelShape) -> Iterator[Problem]:
    """Yield the problems of tensor- and pipeline-parallel sizes that the model does not fit, by their flags."""
    query, shared = shape.num_attention_heads, shape.num_key_value_heads
    sizes = tensor_sizes(query, shared)
    if layout.tensor not in sizes:
        yield Problem(
            "--tensor",
            f"{layout.tensor} tensor-parallel ranks cannot share {query} query and {shared} key-value heads",
            f"use one of {sizes}",
        )
    if layout.pipeline > shape.num_hidden_layers:
        yield Problem(
            "--pipeline",
            f"{layout.pipeline} stages are more than the model's {shape.num_hidden_layers} layers",
            f"use at most {shape.num_hidden_layers}",
        )
