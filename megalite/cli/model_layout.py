"""The tensor x pipeline layouts that a model fits, for the commands that run one."""

from collections.abc import Iterator

from megalite.errors import Problem
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import heads_fit


def layout_problems(tensor: int, pipeline: int, shape: ModelShape) -> Iterator[Problem]:
    """Yield the problems of --tensor and --pipeline for a model."""
    query, shared = shape.num_attention_heads, shape.num_key_value_heads
    if query % tensor or not heads_fit(shared, tensor):
        message = f"{tensor} tensor-parallel ranks cannot share {query} query and {shared} key-value heads"
        sizes = [n for n in range(1, query + 1) if query % n == 0 and heads_fit(shared, n)]
        yield Problem("--tensor", message, f"use one of {sizes}")
    if pipeline > shape.num_hidden_layers:
        message = f"{pipeline} stages are more than the model's {shape.num_hidden_layers} layers"
        yield Problem("--pipeline", message, f"use at most {shape.num_hidden_layers}")
