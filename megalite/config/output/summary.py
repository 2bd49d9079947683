"""The facts of a resolved run that people ask for first: parameters, layout, batch, length. No torch."""

from dataclasses import replace
from math import prod

from megalite.config.sections.adapter_section import described_adapter
from megalite.config.sections.derived import context_choice, vocabulary
from megalite.config.sections.schema import RunConfig
from megalite.topology.flops import active_numel
from megalite.topology.parameters import (
    EMBEDDING,
    HEAD,
    POSITIONS,
    model_parameters,
    stage_parameters,
)
from megalite.topology.place import RankPlace

_UNKNOWN_VOCABULARY = 1
TOKENS_PER_PARAMETER = 20
"""Tokens that train a parameter (Hoffmann et al., "Training compute-optimal large language models", 2022)."""


def shape_line(config: RunConfig) -> str:
    """Return family and sizes: "llama, 4 layers of 128, 4 heads (2 key-value), vocabulary 4,096"."""
    model, rows = config.model, vocabulary(config)
    heads = f"{model.num_attention_heads} heads"
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" ({model.num_key_value_heads} key-value)"
    if model.num_experts:
        heads += f", {model.num_experts} experts ({model.num_experts_per_tok} a token)"
    words = "the tokenizer's vocabulary" if rows is None else f"vocabulary {rows:,}"
    return f"{model.family}, {model.num_hidden_layers} layers of {model.hidden_size}, {heads}, {words}"


def parameters_line(config: RunConfig) -> str:
    """Return the number of parameters: in all, without embedding and head, and those of a mixture for one token."""
    rows = vocabulary(config)
    tables = (EMBEDDING, POSITIONS, HEAD)
    shape = config.model.shape(rows or _UNKNOWN_VOCABULARY)
    parameters = model_parameters(shape)
    inner = sum(each.numel for each in parameters if each.name not in tables)
    adapter = described_adapter(config.adapter)
    if rows is not None and adapter is not None:
        adapted = model_parameters(replace(shape, adapter=adapter))
        trained = sum(each.numel for each in adapted if each.trained)
        whole = sum(each.numel for each in adapted)
        return f"{trained:,} trained of {whole:,} ({trained / whole:.2%})"
    if rows is None:
        return f"{inner:,} without embedding and head, whose size is the tokenizer's"
    total = sum(each.numel for each in parameters)
    active = sum(active_numel(each, shape) for each in parameters)
    of_a_token = f", {active:,} active" if active != total else ""
    return f"{total:,} ({inner:,} without embedding and head{of_a_token})"


def memory_text(size_bytes: float) -> str:
    """Return a size as people say it: "2.1 GiB"."""
    if size_bytes < 2**20:
        return f"{size_bytes / 2**10:.0f} KiB"
    return f"{size_bytes / 2**30:,.1f} GiB" if size_bytes >= 0.1 * 2**30 else f"{size_bytes / 2**20:.0f} MiB"


def tokens_text(count: int) -> str:
    """Return a number of tokens as people say it: "2.5 B", "57 M"."""
    return f"{count / 1e9:,.1f} B" if count >= 1e8 else f"{count / 1e6:.0f} M"


def rank_share_line(config: RunConfig) -> str:
    """Return the parameters of the largest rank; "" where every rank has all, or the vocabulary is unknown."""
    rows, places = vocabulary(config), [*RankPlace.of_stages(config.layout)]
    if rows is None or len(places[0].peers["replica"]) == 1:
        return ""
    shape = config.shape(rows)
    counts = [
        sum(prod(place.local_shape(each)) for each in stage_parameters(shape, config.split, place.at.pp))
        for place in places
    ]
    return f"{max(counts):,} on the largest rank, a rank of stage {counts.index(max(counts))}"


def batch_line(config: RunConfig) -> str:
    """Return the global batch in tokens and how it is made."""
    batch, length = config.batch, config.training.sequence_length
    made = f"micro batch {batch.micro_batch_size} x {batch.micro_batches}"
    if config.training.micro_batch_size == "auto":
        made = f"micro batch auto, {batch.micro_batch_size} or more"
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
    mesh = layout.text
    if layout.pipeline > 1:
        mesh += f", schedule {config.parallel.schedule}"
        if layers is not None:
            chunks = "stage" if config.split.chunks_per_stage == 1 else "chunk"
            mesh += f", layers of each {chunks} {', '.join(map(str, layers))}"
    return mesh + (f", ZeRO {config.zero_stage}" if config.zero_stage else "")


def context_line(config: RunConfig) -> str:
    """Return how ranks share a sequence, and why by this method; "" where none do."""
    choice, method = context_choice(config), config.parallel.context_method
    if choice is None:
        return ""
    ranks, length = config.parallel.context, config.training.sequence_length
    reason = choice.reason if choice.method == method else f"as set; auto is {choice.method}: {choice.reason}"
    return f"{ranks} ranks with {length // ranks:,} positions each, {method}: {reason}"
