"""The configurations of benchmarks/step_time_prediction.py: the values of every axis, in an order that a seed draws."""

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.memory_configurations import column

_ZERO = "deepspeed.zero_optimization.stage"
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {},
    {"parallel.data": 2},
    {"parallel.data": 2},
    {"parallel.data": 4},
    {"parallel.tensor": 2},
    {"parallel.tensor": 2},
    {"parallel.tensor": 2, "parallel.sequence": True},
    {"parallel.tensor": 4},
    {"parallel.tensor": 4, "parallel.sequence": True},
    {"parallel.pipeline": 2},
    {"parallel.pipeline": 2, "parallel.schedule": "gpipe"},
    {"parallel.pipeline": 2, "parallel.schedule": "interleaved_1f1b"},
    {"parallel.pipeline": 2, "parallel.schedule": "looped_bfs"},
    {"parallel.pipeline": 2, "parallel.schedule": "interleaved_zero_bubble"},
    {"parallel.pipeline": 2, "parallel.schedule": "zbv"},
    {"parallel.pipeline": 4},
    {"parallel.pipeline": 4, "parallel.schedule": "dualpipev"},
    {"parallel.pipeline": 2, "parallel.tensor": 2},
    {"parallel.pipeline": 2, "parallel.data": 2},
    {"parallel.tensor": 2, "parallel.data": 2},
    {"parallel.data": 2, _ZERO: 1},
    {"parallel.data": 2, _ZERO: 2},
    {"parallel.data": 2, _ZERO: 3},
)
AXES: dict[str, tuple[Any, ...]] = {
    "model.hidden_size": (128, 256, 384),
    "model.num_hidden_layers": (4, 6),
    "model.num_key_value_heads": (2, 8),
    "model.vocab_size": (1024, 4096, 8192),
    "model.tie_word_embeddings": (True, False),
    "model.chunked_loss": (0, 0, 0, 128),
    "training.sequence_length": (128, 256, 512, 1024),
    "training.micro_batch_size": (1, 2, 4),
    "training.micro_batches": (1, 2, 4),
    "training.precision": ("fp32",),
    "training.recompute": ("none", "none", "selective", "full"),
    "optimizer.name": ("adamw", "adamw", "adamw", "lion", "sgd"),
    "lora": (0, 0, 0, 0, 16),
}
# FLOPs of a step on all ranks: a step of some tenths of a second. bf16 is slow without instructions for it.
_MOST_FLOPS = {"fp32": 1.5e10, "bf16": 5e9}


def configurations(
    generator: random.Random, cases: int, precisions: Sequence[str] = ("fp32",)
) -> list[dict[str, Any]]:
    """Return the settings of so many configurations; each value of an axis is in about as many as any other.

    precisions: the values of that axis; one that stands there twice is drawn twice as often.
    lora: the rank of an adapter, which is no setting of a run without weights to start from; 0: none.
    """
    axes = AXES | {"training.precision": tuple(precisions)}
    columns = {name: column(generator, values, cases) for name, values in axes.items()}
    layouts = column(generator, LAYOUTS, cases)
    rows = [{name: column[case] for name, column in columns.items()} | layouts[case] for case in range(cases)]
    return [_agreed(row, generator) for row in rows]


def _agreed(row: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """Return the settings with those changed that do not go together or take too long, and those that others need."""
    stages = row.get("parallel.pipeline", 1)
    if stages > 1:
        row |= {"training.micro_batches": 2 * stages, "model.num_hidden_layers": 8}
    row["model.intermediate_size"] = generator.choice((2, 3)) * row["model.hidden_size"]
    row["model.num_attention_heads"] = 8
    while _flops(row) > _MOST_FLOPS[row["training.precision"]]:
        shrinks = (
            ("training.micro_batch_size", 1),
            ("training.sequence_length", 128),
            ("model.hidden_size", 128),
        )
        name = next((name for name, least in shrinks if row[name] > least), None)
        if name is None:
            break
        row[name] = row[name] - 128 if name == "model.hidden_size" else row[name] // 2
        row["model.intermediate_size"] = 2 * row["model.hidden_size"]
    return row


def _flops(row: dict[str, Any]) -> float:
    hidden, inner = row["model.hidden_size"], row["model.intermediate_size"]
    layer = hidden * (4 * hidden + 3 * inner + row["training.sequence_length"])
    weights = row["model.num_hidden_layers"] * layer + hidden * row["model.vocab_size"]
    tokens = (
        row["training.micro_batch_size"] * row["training.micro_batches"] * row["training.sequence_length"]
    )
    return 6.0 * weights * tokens * row.get("parallel.data", 1)
