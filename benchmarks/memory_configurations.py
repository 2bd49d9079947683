"""The configurations of benchmarks/memory_prediction.py: every value of every axis, in an order that a seed draws."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megalite.config.load import load_run
from megalite.config.sections.adapter_section import AdapterConfig
from megalite.config.sections.schema import RunConfig
from megalite.planner.memory import largest_rank
from megalite.planner.planned_run import PlannedRun
from megalite.topology.optimizers import OPTIMIZERS

_ZERO = "deepspeed.zero_optimization."
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"parallel.data": 2},
    {"parallel.tensor": 2},
    {"parallel.tensor": 2, "parallel.sequence": True},
    {"parallel.tensor": 4, "parallel.sequence": True},
    {"parallel.pipeline": 2},
    {"parallel.pipeline": 4},
    {"parallel.pipeline": 2, "parallel.schedule": "gpipe"},
    {"parallel.pipeline": 2, "parallel.schedule": "interleaved_1f1b"},
    {"parallel.pipeline": 2, "parallel.schedule": "interleaved_zero_bubble"},
    {"parallel.pipeline": 2, "parallel.schedule": "zbv"},
    {"parallel.pipeline": 2, "parallel.schedule": "dualpipev"},
    {"parallel.pipeline": 2, "parallel.tensor": 2},
    {"parallel.pipeline": 2, "parallel.data": 2},
    {"parallel.data": 2, _ZERO + "stage": 1},
    {"parallel.pipeline": 2, "parallel.data": 2, _ZERO + "stage": 1},
    {"parallel.data": 2, _ZERO + "stage": 2},
    {"parallel.data": 4, _ZERO + "stage": 2},
    {"parallel.data": 2, _ZERO + "stage": 2, _ZERO + "offload_optimizer.device": "cpu"},
    {"parallel.data": 2, _ZERO + "stage": 3},
    {"parallel.data": 2, "parallel.tensor": 2, _ZERO + "stage": 3},
    {"parallel.data": 2, _ZERO + "stage": 3, _ZERO + "offload_optimizer.device": "cpu"},
)
CONTEXT_LAYOUTS: tuple[dict[str, Any], ...] = tuple(
    {"parallel.context": ranks, "parallel.context_method": method, **others}
    for ranks, method, others in (
        (2, "gather", {}),
        (4, "gather", {}),
        (2, "ring", {}),
        (4, "ring", {}),
        (2, "ulysses", {}),
        (4, "ulysses", {}),
        (2, "gather", {"parallel.tensor": 2, "parallel.sequence": True}),
        (2, "ring", {"parallel.pipeline": 2}),
        (2, "gather", {"parallel.data": 2, _ZERO + "stage": 1}),
        (2, "ulysses", {_ZERO + "stage": 3}),
    )
)
FAMILIES: tuple[dict[str, Any], ...] = (
    {"model.family": "llama"},
    {"model.family": "llama", "model.num_key_value_heads": 2},
    {"model.family": "gpt2"},
    {"model.family": "qwen3", "model.num_key_value_heads": 4},
    {"model.family": "olmo2"},
    {"model.family": "gpt_neox"},
    {"model.family": "phi"},
    {"model.family": "gemma2", "model.num_key_value_heads": 4},
    {"model.family": "granite"},
)
ADAPTERS: tuple[dict[str, Any], ...] = (
    *({},) * 5,
    {"kind": "lora"},
    {"kind": "lora", "dora": True},
    {"kind": "prefix"},
)
RECOMPUTE: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"training.recompute": "selective"},
    {"training.recompute": "full"},
    {"training.recompute": "full", "training.recompute_layers": 1},
)
DROPOUT: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"model.residual_dropout": 0.1},
    {"model.residual_dropout": 0.1, "model.mlp_dropout": 0.1, "model.embedding_dropout": 0.1},
    {"model.attention_dropout": 0.1},
)
AXES: dict[str, tuple[Any, ...]] = {
    "model.hidden_size": (384, 512, 768),
    "model.num_hidden_layers": (4, 6, 8),
    "model.vocab_size": (8192, 16384, 32768),
    "model.chunked_loss": (0, 0, 128),
    "model.kernels": ("fused", "fused", "reference"),
    "training.sequence_length": (256, 512),
    "training.micro_batch_size": (1, 2, 4),
    "training.micro_batches": (1, 2),
    "training.precision": ("fp32", "fp32", "fp32", "bf16"),
    "optimizer.name": ("adamw", "adamw", *(name for name in OPTIMIZERS if name != "adamw")),
}
LONG: dict[str, tuple[Any, ...]] = {
    "training.sequence_length": (1024, 2048),
    "training.micro_batch_size": (1, 1, 2),
    "training.micro_batches": (1, 1, 2),
    "training.precision": ("fp32", "fp32", "fp32", "fp32", "bf16"),
    "model.vocab_size": (4096, 8192),
    "model.hidden_size": (256,),
    "model.num_hidden_layers": (4, 6),
}
# FLOPs of a configuration's products on all ranks in a step; bf16 is slow without instructions for it.
_MOST_FLOPS = {"fp32": 4e10, "bf16": 1e10}


def configurations(generator: random.Random, cases: int) -> list[dict[str, Any]]:
    """Return the settings of so many configurations; each value of an axis is in about as many as any other."""
    return _drawn(generator, cases, AXES, (LAYOUTS, FAMILIES, ADAPTERS, RECOMPUTE, DROPOUT))


def context_configurations(generator: random.Random) -> list[dict[str, Any]]:
    """Return the settings of a configuration for each of CONTEXT_LAYOUTS, with longer sequences of smaller models."""
    tables = (CONTEXT_LAYOUTS, FAMILIES, ({},), RECOMPUTE, DROPOUT)
    return _drawn(generator, len(CONTEXT_LAYOUTS), AXES | LONG, tables)


def _drawn(
    generator: random.Random,
    cases: int,
    axes: Mapping[str, tuple[Any, ...]],
    others: Sequence[tuple[dict[str, Any], ...]],
) -> list[dict[str, Any]]:
    columns = {name: column(generator, values, cases) for name, values in axes.items()}
    tables = [column(generator, values, cases) for values in others]
    rows = []
    for case in range(cases):
        layout, family, adapter, recompute, dropout = (table[case] for table in tables)
        row = {name: values[case] for name, values in columns.items()}
        row |= {**layout, **family, **recompute, **dropout}
        rows.append(_agreed(row | {f"adapter.{name}": value for name, value in adapter.items()}, generator))
    return rows


def resolved(settings: dict[str, Any]) -> RunConfig:
    """Return the run of these settings. An adapter gets no weights to start from, without which no run file may be."""
    flags = []
    for name, value in settings.items():
        if not name.startswith("adapter."):
            flags += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    config = load_run(
        None, [*flags, "--data.source", "stdlib", "--training.steps", "3", "--checkpoint.export", "false"]
    ).config
    adapter = {name.split(".")[1]: value for name, value in settings.items() if name.startswith("adapter.")}
    return config.model_copy(update={"adapter": AdapterConfig(**adapter)})


def predicted_peak(config: RunConfig) -> tuple[float, dict[str, float]]:
    """Return the bytes that the planner predicts of the largest rank, all of them on the host, and those by kind."""
    plain = config.model.kernels == "reference"
    run = PlannedRun.of(config, int(config.model.vocab_size), on_cpu=True, plain_torch=plain)
    run = replace(run, threads=1)  # as benchmarks/ranks.py starts them
    memory = largest_rank(run)
    return memory.peak + memory.host, memory.kinds | {"host": memory.host}


def column(generator: random.Random, values: Sequence[Any], cases: int) -> list[Any]:
    """Return so many of the values in an order that is drawn, each about as often as any other."""
    drawn = [values[index % len(values)] for index in range(cases)]
    generator.shuffle(drawn)
    return drawn


def _agreed(row: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """Return the settings with those changed that do not go together or take too long, and those that others need."""
    stages = row.get("parallel.pipeline", 1)
    if stages > 1:
        row |= {"training.micro_batches": 2 * stages, "model.num_hidden_layers": 8}
    if _ZERO + "stage" in row and OPTIMIZERS[row["optimizer.name"]].whole_matrices:
        row["optimizer.name"] = "adamw"
    most = _MOST_FLOPS[row["training.precision"]] * row.get("parallel.context", 1)
    if "adapter.kind" in row:
        # Frozen weights have neither gradients nor optimizer: the rest is made large beside a process's own noise.
        row |= {"model.vocab_size": 32768, "training.precision": "fp32", "training.micro_batch_size": 4}
        most = 2 * _MOST_FLOPS["fp32"]
    row["model.tie_word_embeddings"] = generator.random() < 0.5
    row["model.intermediate_size"] = generator.choice((2, 3)) * row["model.hidden_size"]
    row["model.num_attention_heads"] = 8
    while _flops(row) > most:
        shrinks = (
            ("training.micro_batch_size", 1),
            ("training.sequence_length", 128),
            ("model.hidden_size", 384),
        )
        name = next((name for name, least in shrinks if row[name] > least), None)
        if name is None:
            break
        row[name] = row[name] - 128 if name == "model.hidden_size" else row[name] // 2
    return row


def _flops(row: dict[str, Any]) -> float:
    hidden, inner = row["model.hidden_size"], row["model.intermediate_size"]
    weights = (
        row["model.num_hidden_layers"] * hidden * (4 * hidden + 3 * inner) + hidden * row["model.vocab_size"]
    )
    tokens = (
        row["training.micro_batch_size"] * row["training.micro_batches"] * row["training.sequence_length"]
    )
    return 6.0 * weights * tokens * row.get("parallel.data", 1)
