"""Rules over [model]: what its family can express, and settings that only mean something together."""

from collections.abc import Iterator
from math import ceil

from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.schema import ModelConfig
from megalite.config.sections.shape_settings import model_shape, rope_setting
from megalite.config.sections.toml import shown
from megalite.errors import Problem
from megalite.families.registry import FAMILIES, inexpressible
from megalite.families.rope import SCALINGS
from megalite.topology.sharding import divisors


def family_can_be_exported(run: CheckedRun) -> Iterator[Problem]:
    if not run.checkpoint.export:
        return
    for name, value, theirs in inexpressible(model_shape(run.model, 1)):
        if name == "rope_scaling":
            message = f"{shown(run.model.rope_type)} cannot be written in a {run.model.family} config.json"
            yield Problem(
                "model.rope_type",
                message,
                'use "default", or checkpoint.export = false',
                {"checkpoint.export": False},
            )
            continue
        has, use = (
            ("no such key", "delete the setting")
            if theirs is None
            else (shown(theirs), f"use {shown(theirs)}")
        )
        message = f"{shown(value)} cannot be written in a {run.model.family} config.json, which has {has}"
        remedy = f"{use}, choose another model.family, or set checkpoint.export = false"
        yield Problem.reset(f"model.{name}", message, remedy, theirs)


def rope_settings_belong_to_their_type(run: CheckedRun) -> Iterator[Problem]:
    kind = run.model.rope_type
    used = SCALINGS.get(kind, ())
    for name in dict.fromkeys(name for names in SCALINGS.values() for name in names):
        setting = rope_setting(name)
        if name not in used and getattr(run.model, setting) != ModelConfig.model_fields[setting].default:
            message = f"has no effect with model.rope_type = {shown(kind)}"
            kinds = " or ".join(shown(other) for other, names in SCALINGS.items() if name in names)
            yield Problem.reset(
                f"model.{setting}", message, f"set model.rope_type to {kinds}, or delete the setting"
            )
    if kind not in ("default", "longrope") and "model.rope_factor" not in run.origins:
        message = f"is required with model.rope_type = {shown(kind)}"
        yield Problem(
            "model.rope_factor",
            message,
            'set it, as in 4.0, or model.rope_type = "default"',
            {"model.rope_type": "default"},
        )
    if kind == "llama3" and run.model.rope_low_freq_factor >= run.model.rope_high_freq_factor:
        message = f"{run.model.rope_low_freq_factor} is not less than model.rope_high_freq_factor"
        yield Problem(
            "model.rope_low_freq_factor",
            message,
            "use 1.0, with model.rope_high_freq_factor 4.0, as in Llama 3.1",
            {"model.rope_low_freq_factor": 1.0, "model.rope_high_freq_factor": 4.0},
        )


def yarn_and_longrope_have_their_numbers(run: CheckedRun) -> Iterator[Problem]:
    model, kind = run.model, run.model.rope_type
    if kind == "yarn" and model.rope_beta_fast < model.rope_beta_slow:
        message = f"{model.rope_beta_fast} is less than model.rope_beta_slow = {model.rope_beta_slow}"
        yield Problem(
            "model.rope_beta_fast",
            message,
            "use 32.0, with model.rope_beta_slow 1.0, as in YaRN's paper",
            {"model.rope_beta_fast": 32.0, "model.rope_beta_slow": 1.0},
        )
    # A config.json without the factors is a problem of its own.
    if kind != "longrope" or "model" in run.incomplete:
        return
    pairs = model_shape(model, 1).rotary_dim // 2
    for setting in ("rope_short_factor", "rope_long_factor"):
        if (count := len(getattr(model, setting))) != pairs:
            message = f"has {count} numbers, but a head has {pairs} rotated pairs"
            yield Problem(f"model.{setting}", message, f"give {pairs} numbers")
    longest, original = model.max_position_embeddings, model.rope_original_positions
    factors = {"model.rope_factor", "model.rope_attention_factor"}
    if longest > original and not factors & run.origins.keys():
        message = (
            f"is required where model.max_position_embeddings {longest} is more than "
            f"model.rope_original_positions {original}"
        )
        yield Problem.reset("model.rope_factor", message, f"use {longest / original:g}", longest / original)


def scaled_rotations_can_be_computed(run: CheckedRun) -> Iterator[Problem]:
    model, kind = run.model, run.model.rope_type
    if kind == "dynamic" and model_shape(model, 1).rotary_dim <= 2:
        yield Problem.reset(
            "model.rope_type", '"dynamic" needs more than one rotated pair per head', 'use "linear"', "linear"
        )
    if kind == "yarn" and model.rope_theta <= 1:
        message = f"{model.rope_theta} is not more than 1, as yarn requires"
        yield Problem.reset("model.rope_theta", message, "use 10000.0", 10000.0)
    if kind == "longrope" and model.rope_factor > 1 and model.rope_original_positions == 1:
        message = "1 is too short: longrope divides by its logarithm"
        yield Problem.reset(
            "model.rope_original_positions",
            message,
            "use the sequence length of pre-training, for example 4096",
            4096,
        )


def window_leaves_layers(run: CheckedRun) -> Iterator[Problem]:
    first, layers = run.model.full_attention_layers, run.model.num_hidden_layers
    every = run.model.full_attention_every
    if run.model.sliding_window is None:
        for name in ("full_attention_layers", "full_attention_every", "rope_local_base_freq"):
            if value := getattr(run.model, name):
                message = f"{value} has no effect without model.sliding_window"
                yield Problem.reset(
                    f"model.{name}", message, "set model.sliding_window, or delete the setting"
                )
    elif first >= layers:
        message = f"{first} leaves no layer of model.num_hidden_layers = {layers} with the sliding window"
        yield Problem.reset(
            "model.full_attention_layers",
            message,
            f"use at most {layers - 1}, or delete model.sliding_window",
            layers - 1,
        )
    elif every == 1:
        message = f"1 leaves no layer of model.num_hidden_layers = {layers} with the sliding window"
        yield Problem.reset(
            "model.full_attention_every", message, "use 2 or more, or delete model.sliding_window", 2
        )


def query_heads_share_key_value_heads(run: CheckedRun) -> Iterator[Problem]:
    query, shared = run.model.num_attention_heads, run.model.num_key_value_heads
    if shared is not None and query % shared:
        message = f"{shared} does not divide model.num_attention_heads = {query}"
        nearest = max(size for size in divisors(query) if size <= shared)
        cure = {"model.num_key_value_heads": nearest}
        yield Problem("model.num_key_value_heads", message, f"use one of {divisors(query)}", cure)


def heads_fill_hidden_size(run: CheckedRun) -> Iterator[Problem]:
    hidden, heads = run.model.hidden_size, run.model.num_attention_heads
    if run.model.head_dim is None and run.model.kv_lora_rank is None and hidden % heads:
        message = f"{heads} does not divide model.hidden_size = {hidden}"
        nearest = max(size for size in divisors(hidden) if size <= heads)
        yield Problem.reset(
            "model.num_attention_heads",
            message,
            f"use one of {divisors(hidden)}, or set model.head_dim",
            nearest,
        )


def head_dim_is_even(run: CheckedRun) -> Iterator[Problem]:
    learned = FAMILIES[run.model.family].fixed.get("position_embedding") == "learned"
    if learned or run.model.kv_lora_rank is not None:
        return
    dim = run.model.head_dim
    if dim is not None:
        if dim % 2:
            message = f"{dim} is odd, but rotary embeddings rotate pairs"
            yield Problem.reset("model.head_dim", message, f"use {dim + 1}", dim + 1)
        return
    hidden, heads = run.model.hidden_size, run.model.num_attention_heads
    if hidden % heads == 0 and hidden // heads % 2:
        message = f"{hidden} / model.num_attention_heads {heads} = {hidden // heads} is an odd head_dim"
        remedy = f"rotary embeddings rotate pairs: use {heads * (hidden // heads + 1)}, or set model.head_dim"
        even = {"model.hidden_size": heads * (hidden // heads + 1)}
        yield Problem("model.hidden_size", message, remedy, even)


def rotated_share_is_even(run: CheckedRun) -> Iterator[Problem]:
    shape = model_shape(run.model, 1)
    dim, share = shape.head_dim, shape.partial_rotary_factor
    if (
        run.model.kv_lora_rank is None
        and dim
        and dim % 2 == 0
        and (shape.rotary_dim % 2 or not shape.rotary_dim)
    ):
        # Rounded up, so that the product with head_dim is not below the even number.
        even = ceil(20_000 * max(1, shape.rotary_dim // 2) / dim) / 10_000
        message = f"{share} of head_dim = {dim} is {shape.rotary_dim}, but rotary embeddings rotate pairs"
        yield Problem.reset("model.partial_rotary_factor", message, f"use {even}", even)
