"""Makes a run small without changing its path through the code: sizes shrink, what branches stays. No torch.

Kept: heads and their groups, experts, stages, chunks and uneven layers among them, remainders of what ranks divide,
schedule, ZeRO, precision of sums, recomputation, dropout, adapters, terms of the loss, groups of parameters, clipping.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from megalite.config.sections.schema import RunConfig
from megalite.topology.optimizers import OPTIMIZERS
from megalite.verify.drawn_text import TOKENIZER_IDS

# The most that is left of each size; ranks still have uneven shards where the run's are uneven.
_WIDTHS = {"hidden_size": 64, "head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 32}
_LATENT_WIDTHS = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_CUT_WIDTHS = {"intermediate_size": 96, "moe_intermediate_size": 32, "shared_intermediate_size": 48}
# As large as gradients are after clipping: AdamW then makes no update of full size from the rounding of a small one.
_EPSILON = 0.1
_VOCABULARY, _SEQUENCE, _LAYERS_A_CHUNK, _MICRO_BATCH, _PERSISTENT = TOKENIZER_IDS + 40, 64, 2, 2, 100
# Settings that repeat a kind of layer with a period, or name the first ones of a kind.
_PERIODS = ("full_attention_every", "no_rope_every", "decoder_sparse_step")
_FIRST_LAYERS = ("full_attention_layers", "first_k_dense_replace")


@dataclass(frozen=True)
class Shrunk:
    """A small run, and each changed setting as "key: before -> after"."""

    config: RunConfig
    changes: tuple[str, ...]


def shrunk(config: RunConfig, *, full_size: bool = False) -> Shrunk:
    """Return a run of the same path through the code that takes seconds; `config` is resolved.

    full_size: only the optimizer's epsilon changes.
    """
    return _changed(config, dict(_smooth(config) if full_size else [*_changes(config), *_smooth(config)]))


def with_every_expert(small: Shrunk) -> Shrunk:
    """Return a run of bf16 or fp16 whose tokens go to all experts; a run without experts is returned unchanged.

    Two experts with close scores swap their order by rounding, and another expert has another gradient: with a choice
    of experts no two runs in these types agree.
    """
    model = small.config.model
    if not model.num_experts:
        return small
    values = {"num_experts_per_tok": model.num_experts, "topk_group": model.n_group}
    every = _changed(small.config, {f"model.{name}": value for name, value in values.items()})
    return Shrunk(every.config, small.changes + every.changes)


def _changed(config: RunConfig, values: Mapping[str, Any]) -> Shrunk:
    changed = config.model_dump()
    lines = []
    for key, value in values.items():
        section, *path, name = key.split(".")
        table = changed[section]
        for part in path:
            table = table.setdefault(part, {})
        if table.get(name) != value:
            lines.append(f"{key}: {_text(table.get(name))} -> {_text(value)}")
            table[name] = value
    return Shrunk(RunConfig.model_validate(changed), tuple(lines))


def _changes(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the small run that may be others."""
    yield from _model_changes(config)
    yield from _layer_changes(config)
    yield from _batch_changes(config)
    training, optimizer = config.training, config.optimizer
    if optimizer.warmup_steps or optimizer.warmup_ratio:
        # Else the first steps would hardly change a weight.
        yield "optimizer.warmup_ratio", 0.0
        yield "optimizer.warmup_steps", 1
    if config.zero_stage == 3:
        # Else ZeRO 3 would leave weights of this size whole.
        yield "deepspeed.zero_optimization.stage3_param_persistence_threshold", _PERSISTENT
    if training.stop_after is not None:
        yield "training.stop_after", None


def _smooth(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield an epsilon with which an update is known as well as its gradient, if the optimizer has one."""
    if "eps" in OPTIMIZERS[config.optimizer.name].settings:
        yield "optimizer.eps", max(config.optimizer.eps, _EPSILON)


def _model_changes(config: RunConfig) -> Iterator[tuple[str, Any]]:
    model, layout = config.model, config.layout
    for name in ("weights", "preset", "hf_config"):
        yield f"model.{name}", None
    if config.adapter.path is not None:
        yield "adapter.path", None
    latent = model.kv_lora_rank is not None
    for name, most in {**_WIDTHS, **(_LATENT_WIDTHS if latent else {})}.items():
        # Factors of LongRoPE are one for each pair of a head.
        fixed = name == "head_dim" and (latent or model.rope_type == "longrope")
        size = getattr(model, name)
        if name == "head_dim" and size is None and not latent:
            size = model.hidden_size // model.num_attention_heads
        if size is not None and not fixed:
            yield f"model.{name}", min(size, most)
    for name, most in _CUT_WIDTHS.items():
        if size := getattr(model, name):
            yield f"model.{name}", _like(size, most, layout.tensor)
    rows = model.vocab_size
    # "auto" is the size of a tokenizer that is not known yet: one row more than ranks divide shows more.
    remainder = rows % layout.tensor if isinstance(rows, int) else 1 % layout.tensor
    yield "model.vocab_size", -(-_VOCABULARY // layout.tensor) * layout.tensor + remainder
    length = _sequence_length(config)
    if model.sliding_window is not None and length < config.training.sequence_length:
        yield "model.sliding_window", max(2, model.sliding_window * length // config.training.sequence_length)
    if model.position_embedding == "learned":
        yield "model.max_position_embeddings", min(model.max_position_embeddings, 2 * length)


def _layer_changes(config: RunConfig) -> Iterator[tuple[str, Any]]:
    model, sizes = config.model, [len(layers) for layers in config.split.layers]
    periods = (getattr(model, name) or 0 for name in _PERIODS)
    firsts = ((getattr(model, name) or 0) + 1 for name in _FIRST_LAYERS)
    needed = max(1, *periods, *firsts, *(layer + 1 for layer in model.mlp_only_layers))
    least = min(sizes)
    # Uneven chunks stay uneven, and every kind of layer is there.
    fewer = [min(size, _LAYERS_A_CHUNK + (size > least)) for size in sizes]
    while sum(fewer) < min(needed, sum(sizes)):
        place = max(range(len(sizes)), key=lambda each: sizes[each] - fewer[each])
        fewer[place] += 1
    if fewer != sizes:
        yield "model.num_hidden_layers", sum(fewer)
        yield "parallel.layers_per_stage", tuple(fewer)
        if (first := config.training.recompute_layers) is not None:
            yield "training.recompute_layers", min(first, max(1, min(fewer) - 1))


def _batch_changes(config: RunConfig) -> Iterator[tuple[str, Any]]:
    training, plan, stages = config.training, config.batch, config.layout.pipeline
    size = min(plan.micro_batch_size, _MICRO_BATCH)
    count = plan.micro_batches
    if count > 2 * stages:
        count = 2 * stages + count % stages
    length = _sequence_length(config)
    yield "training.sequence_length", length
    yield "training.micro_batch_size", size
    yield "training.micro_batches", count
    yield "training.global_batch_size", size * count * plan.data
    before, after = plan.micro_batch_size * training.sequence_length, size * length
    for key, tokens in (
        ("training.sequence_chunk", training.sequence_chunk),
        ("model.chunked_loss", config.model.chunked_loss),
    ):
        if tokens:
            yield key, max(1, tokens * after // before)


def _sequence_length(config: RunConfig) -> int:
    """Return a length that ranks divide as they do the run's."""
    layout, length = config.layout, config.training.sequence_length
    unit = lcm(2 * layout.context, layout.tensor if config.parallel.sequence else 1)
    return _like(length, _SEQUENCE, unit * layout.context)


def _like(size: int, most: int, divisor: int) -> int:
    """Return a size that is not much larger than `most`, with the same remainder by `divisor`."""
    return size if size <= most else -(-most // divisor) * divisor + size % divisor


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def alone(config: RunConfig, *, micro_batches: bool = False) -> RunConfig:
    """Return the run that one process trains for comparison: the same model and samples in one micro batch.

    With torch's own operators and optimizer, nothing computed again, and nothing kept elsewhere.
    micro_batches: add up the run's own micro batches, whose sums round as those of its ranks.
    """
    rows = config.batch.global_batch_size
    size = config.batch.micro_batch_size if micro_batches else rows
    changes: Mapping[str, Mapping[str, Any]] = {
        "parallel": {
            **dict.fromkeys(("tensor", "context", "pipeline", "data", "expert", "virtual_stages"), 1),
            **{"expert_tensor": None, "sequence": False, "schedule": "1f1b", "layers_per_stage": None},
            "context_method": "auto",
        },
        "training": {
            **{"micro_batch_size": size, "micro_batches": rows // size, "global_batch_size": rows},
            **{"recompute": "none", "recompute_layers": None, "recompute_ratio": None},
            **{"compile": False, "sequence_chunk": 0, "offload_activations": False},
        },
        "model": {"kernels": "reference", "chunked_loss": 0},
    }
    sections = {
        name: getattr(config, name).model_copy(update=dict(change)) for name, change in changes.items()
    }
    return config.model_copy(update={**sections, "deepspeed": None})
