"""The facts of a resolved run that people ask for first: parameters, layout, batch, length. No torch."""

from math import prod
from typing import Literal

from megalite.config.facts import Facts
from megalite.config.schema import RunConfig
from megalite.topology.parameters import EMBEDDING, HEAD, POSITIONS, model_parameters, stage_parameters

_UNKNOWN_VOCABULARY = 1


def vocabulary(config: RunConfig | Facts) -> int | None:
    """Return the rows of the embedding; None where a tokenizer that is not read or trained yet decides."""
    rows: int | Literal["auto"] = config.model.vocab_size
    rows = config.tokenizer.vocab_size if rows == "auto" else rows
    return None if rows == "auto" else rows


def shape_line(config: RunConfig) -> str:
    """Return family and sizes: "llama, 4 layers of 128, 4 heads (2 key-value), vocabulary 4,096"."""
    model, rows = config.model, vocabulary(config)
    heads = f"{model.num_attention_heads} heads"
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" ({model.num_key_value_heads} key-value)"
    words = "the tokenizer's vocabulary" if rows is None else f"vocabulary {rows:,}"
    return f"{model.family}, {model.num_hidden_layers} layers of {model.hidden_size}, {heads}, {words}"


def parameters_line(config: RunConfig) -> str:
    """Return the number of parameters, in all and without the embedding (and a head of its own)."""
    rows = vocabulary(config)
    tables = (EMBEDDING, POSITIONS, HEAD)
    shape = config.model.shape(rows or _UNKNOWN_VOCABULARY)
    parameters = model_parameters(shape)
    inner = sum(each.numel for each in parameters if each.name not in tables)
    if rows is None:
        return f"{inner:,} without embedding and head, whose size is the tokenizer's"
    return f"{sum(each.numel for each in parameters):,} ({inner:,} without embedding and head)"


def rank_share_line(config: RunConfig) -> str:
    """Return the parameters of the largest rank; "" where every rank has all, or the vocabulary is unknown."""
    rows, parallel = vocabulary(config), config.parallel
    if rows is None or parallel.tensor * parallel.pipeline == 1:
        return ""
    shape = config.model.shape(rows)
    held = [
        sum(
            prod(each.spec.local_shape(0, parallel.tensor))
            for each in stage_parameters(shape, config.split, stage)
        )
        for stage in range(parallel.pipeline)
    ]
    return f"{max(held):,} on the largest rank, a rank of stage {held.index(max(held))}"


def batch_line(config: RunConfig) -> str:
    """Return the global batch in tokens and how it is made."""
    batch, length = config.batch, config.training.sequence_length
    made = f"micro batch {batch.micro_batch_size} x {batch.micro_batches}"
    if batch.data > 1:
        made += f" x data {batch.data}"
    return f"{batch.global_batch_size * length:,} tokens: {batch.global_batch_size} sequences of {length:,} ({made})"


def length_line(config: RunConfig) -> str:
    """Return the length of the run: steps and tokens, or epochs."""
    training = config.training
    if training.steps is None:
        return f"{training.epochs:g} epochs"
    tokens = training.steps * config.batch.global_batch_size * training.sequence_length
    return f"{training.steps:,} steps, {tokens:,} tokens"


def layout_line(config: RunConfig) -> str:
    """Return the mesh and the ZeRO stage."""
    layout, layers = config.layout, config.parallel.layers_per_stage
    mesh = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"
    if layout.pipeline > 1:
        mesh += f", schedule {config.parallel.schedule}"
        if layers is not None:
            chunks = "stage" if config.split.chunks_per_stage == 1 else "chunk"
            mesh += f", layers of each {chunks} {', '.join(map(str, layers))}"
    return mesh + (f", ZeRO {config.zero_stage}" if config.zero_stage else "")
