"""The equations of derived values, as data; `megalite config show --explain` prints them with each number's origin.

An equation is arithmetic over names in braces, and each name is a setting, a number of `_numbers` or another equation.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config.sections.derived import context_choice, vocabulary
from megalite.config.sections.schema import RunConfig, warmup_of
from megalite.config.sections.toml import format_value
from megalite.topology.flops import flops_per_token, forward_flops
from megalite.topology.optimizers import OPTIMIZERS
from megalite.topology.parameters import EMBEDDING, HEAD, POSITIONS, model_parameters
from megalite.topology.schedules import SCHEDULES

NAME = re.compile(r"\{([^{}]+)\}")
_BATCH = "{training.micro_batch_size} * {training.micro_batches} * {parallel.data}"
_METHOD = (
    '"ulysses" if {heads a rank} % {parallel.context} == 0 and {values sent by ulysses} <= {values sent by gather} '
    'else "ring" if {values kept by gather} > {values kept of a layer} else "gather"'
)
# The settings that load_run fills in, then the numbers that follow from the settings.
EQUATIONS: dict[str, str] = {
    "parallel.data": "{ranks} / ({parallel.tensor} * {parallel.context} * {parallel.pipeline})",
    "parallel.context_method": _METHOD,
    "parallel.virtual_stages": "{chunks of the schedule} if {parallel.pipeline} > 1 else 1",
    "parallel.layers_per_stage": "{layers of equal work}",
    "training.micro_batch_size": "{training.global_batch_size} / ({training.micro_batches} * {parallel.data})",
    "training.micro_batches": "{training.global_batch_size} / ({training.micro_batch_size} * {parallel.data})",
    "training.global_batch_size": _BATCH,
    "optimizer.momentum": "{momentum of the optimizer}",
    "model.num_key_value_heads": "{model.num_attention_heads}",
    "model.head_dim": "{model.hidden_size} // {model.num_attention_heads}",
    "model.chunked_loss": "{training.sequence_chunk}",
    "rows of the vocabulary": "{tokenizer.vocab_size}",
    "tokens a step": "{training.global_batch_size} * {training.sequence_length}",
    "tokens": "{training.steps} * {tokens a step}",
    "warm-up steps": "{optimizer.warmup_steps} or ceil({optimizer.warmup_ratio} * {training.steps})",
    "layers a stage": "{model.num_hidden_layers} / {parallel.pipeline}",
    "positions a rank": "{training.sequence_length} / {parallel.context}",
    "heads a rank": "{model.num_attention_heads} / {parallel.tensor}",
    "parameters": "{parameters of the tables} + {parameters of the layers} + {other parameters}",
    "FLOPs a token": "3 * ({forward FLOPs of the layers} + {forward FLOPs of the head})",
    "train_micro_batch_size_per_gpu": "{training.micro_batch_size} * {training.micro_batches}",
    "gradient_accumulation_steps": "1",
    "train_batch_size": "{train_micro_batch_size_per_gpu} * {gradient_accumulation_steps} * {parallel.data}",
}
_OF_LATENT_ATTENTION = {"model.head_dim": "{model.qk_nope_head_dim} + {model.qk_rope_head_dim}"}
"""Setting or number -> its equation."""
OPEN: Mapping[str, str] = {
    "model.vocab_size": "the number of ids of the tokenizer, when it is read or trained",
    "training.precision": "the type of the resumed checkpoint, else bf16 if the device is fast in it, else fp32",
    "training.micro_batch_size": "the largest that fits the memory of every rank, tried before the first step",
    "training.threads": "the cores of the machine / its ranks",
}
"""Setting that stays open with "auto" -> what decides it at the start."""


@dataclass(frozen=True)
class ExplainedValue:
    """A derived value. numbers: name in its equation -> value."""

    key: str
    value: Any
    equation: str
    numbers: Mapping[str, Any]


def explained_values(config: RunConfig, origin: Callable[[str], str]) -> Iterator[ExplainedValue]:
    """Yield every derived value of a resolved run. origin: of a setting, "derived" where load_run filled it in."""
    values = _numbers(config) | _results(config)
    latent = _OF_LATENT_ATTENTION if config.model.kv_lora_rank else {}
    for key, equation in (EQUATIONS | latent).items():
        if "." in key and origin(key) != "derived":
            continue
        names = NAME.findall(equation)
        known = {name: _value(config, name, values) for name in names}
        value = _value(config, key, values)
        if value is not None and None not in known.values():
            yield ExplainedValue(key, value, equation, known)


def explanation(config: RunConfig, origin: Callable[[str], str]) -> Iterator[str]:
    """Yield a line for every derived value: its equation with the value and the origin of each number in it."""
    explained = {value.key: value for value in explained_values(config, origin)}
    for value in explained.values():
        yield f"{value.key} = {format_value(value.value)} = {_shown(value, explained, origin)}"
    for key, decides in OPEN.items():
        if _value(config, key, {}) == "auto":
            yield f"{key} stays open: {decides}"


def _shown(
    value: ExplainedValue, explained: Mapping[str, ExplainedValue], origin: Callable[[str], str]
) -> str:
    def number(match: re.Match[str]) -> str:
        name = match[1]
        short = name.rpartition(".")[2]
        shown = f"{short} {format_value(value.numbers[name])}"
        if name in explained:
            return f"{shown} (= {_shown(explained[name], explained, origin)})"
        return f"{shown} ({origin(name)})" if "." in name else shown

    return NAME.sub(number, value.equation) if value.numbers else f"{value.equation} always"


def _value(config: RunConfig, name: str, values: Mapping[str, Any]) -> Any:
    if name in values or "." not in name:
        return values.get(name)
    section, key = name.split(".")
    value = getattr(getattr(config, section), key)
    return list(value) if isinstance(value, tuple) else value


def _numbers(config: RunConfig) -> dict[str, Any]:
    """Return the numbers of equations that are no settings: of a table, or of the model's shape; None: not known."""
    rows, balanced = vocabulary(config), config.parallel.layers_per_stage
    choice = context_choice(config)
    numbers: dict[str, Any] = {
        "ranks": config.layout.world_size,
        "chunks of the schedule": SCHEDULES[config.parallel.schedule].default_chunks,
        "layers of equal work": None if balanced is None else list(balanced),
        "momentum of the optimizer": OPTIMIZERS[config.optimizer.name].momentum or 0.0,
        **({} if choice is None else choice.numbers),
    }
    if rows is None:
        return numbers
    shape = config.shape(rows)
    parameters = model_parameters(shape)
    tables = sum(each.numel for each in parameters if each.name in (EMBEDDING, POSITIONS, HEAD))
    layers = sum(each.numel for each in parameters if ".layers." in each.name)
    forward = forward_flops(shape, config.training.sequence_length)
    return numbers | {
        "parameters of the tables": tables,
        "parameters of the layers": layers,
        "other parameters": sum(each.numel for each in parameters) - tables - layers,
        "forward FLOPs of the layers": sum(forward.layers),
        "forward FLOPs of the head": forward.head,
    }


def _results(config: RunConfig) -> dict[str, Any]:
    """Return the derived numbers that are no settings, computed by the code that a run uses; None: not known."""
    batch, training, rows = config.batch, config.training, vocabulary(config)
    tokens, layout = batch.global_batch_size * training.sequence_length, config.layout
    layers = {len(config.split.layers_of(stage)) for stage in range(layout.pipeline)}
    shape = None if rows is None else config.shape(rows)
    results: dict[str, Any] = {
        "rows of the vocabulary": rows if config.model.vocab_size == "auto" else None,
        "tokens a step": tokens,
        "tokens": None if training.steps is None else training.steps * tokens,
        "warm-up steps": None if training.steps is None else warmup_of(config.optimizer, training.steps),
        "layers a stage": layers.pop() if len(layers) == 1 else None,
        "positions a rank": training.sequence_length // layout.context if layout.context > 1 else None,
        "heads a rank": config.model.num_attention_heads // layout.tensor,
        "parameters": None if shape is None else sum(each.numel for each in model_parameters(shape)),
    }
    # Frozen weights have no gradient: the backward is then less than twice the forward.
    if shape is not None and shape.adapter is None:
        results["FLOPs a token"] = flops_per_token(shape, training.sequence_length)
    if config.zero_stage:
        handed = config.deepspeed_json()
        names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        results |= {name: handed[name] for name in names}
        results["train_batch_size"] = handed[names[0]] * handed[names[1]] * layout.data
    return results
