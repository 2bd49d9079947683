"""Whether a model suits a layout without training, and fits this machine, before anything is loaded. No torch."""

from collections.abc import Iterator

from megalite.config.output.summary import memory_text
from megalite.errors import Problem
from megalite.generation.source import ModelSource
from megalite.launcher.process import has_accelerator, total_memory_bytes
from megalite.topology.axes import Layout
from megalite.topology.context import LEAST_TOKENS
from megalite.topology.dtypes import FLOATS
from megalite.topology.parameters import parameter_count
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import tensor_sizes

CPU_DTYPE = "float32"
"""The number type of weights and computation on a CPU, unless the user names another."""
DEFAULT_TOKENS = 4096
"""The longest context of a request, prompt included, where none is asked for."""


def layout_problems(layout: Layout, shape: ModelShape) -> Iterator[Problem]:
    """Yield the problems of sizes of a layout that the model does not fit, by their flags."""
    query, shared = shape.num_attention_heads, shape.num_key_value_heads
    sizes = tensor_sizes(query, shared)
    if layout.tensor not in sizes:
        yield Problem.reset(
            "--tensor",
            f"{layout.tensor} tensor-parallel ranks cannot share {query} query and {shared} key-value heads",
            f"use one of {sizes}",
            max(size for size in sizes if size <= layout.tensor),
        )
    if layout.pipeline > shape.num_hidden_layers:
        yield Problem.reset(
            "--pipeline",
            f"{layout.pipeline} stages are more than the model's {shape.num_hidden_layers} layers",
            f"use at most {shape.num_hidden_layers}",
            shape.num_hidden_layers,
        )
    longest = max(1, shape.longest_sequence // LEAST_TOKENS)
    if layout.context > longest:
        message = (
            f"{layout.context} ranks cannot share a sequence of the model's {shape.longest_sequence} tokens"
        )
        remedy = f"use at most {longest}, {LEAST_TOKENS} tokens a rank"
        yield Problem.reset("--context", message, remedy, longest)


def cache_problems(
    source: ModelSource,
    dtype: str | None,
    slots: tuple[str, int],
    tokens: tuple[str, int],
    *,
    copies: int = 1,
) -> Iterator[Problem]:
    """Yield the problem of a model, or of its cache, that all ranks of this machine's CPU together cannot hold.

    dtype: torch's name of it; None: the default. slots, tokens: the flag and its value: requests at a time, and tokens
    of each. copies: of the model and the cache, over ranks that share work.
    """
    total = total_memory_bytes()
    if total is None or has_accelerator():
        return
    total, copy_of_it = total // copies, f" for each of {copies} copies" if copies > 1 else ""
    dtype = dtype or CPU_DTYPE
    shape = source.shape
    weights = parameter_count(shape) * (1 if source.int8 else FLOATS[dtype].size_bytes)
    of_token = cache_bytes(shape, dtype)
    cache = slots[1] * tokens[1] * of_token
    if weights + cache <= total:
        return
    if weights + min(cache, of_token) > total:
        kind = "int8" if source.int8 else dtype
        message = f"{source.folder} does not fit: its weights need {memory_text(weights)} in {kind}"
        smaller = [] if source.int8 else ["an int8 export"]
        smaller += ["--dtype bfloat16"] if kind == "float32" else []
        fewer = ["fewer context or data ranks"] if copies > 1 else []
        remedy = "use " + " or ".join([*fewer, "a smaller model", *smaller])
        yield Problem("MODEL", f"{message}, and this machine has {memory_text(total)}{copy_of_it}", remedy)
        return
    flag, value = max(slots, tokens, key=lambda named: named[1])
    fits = (total - weights) * value // cache
    message = (
        f"{value:,} does not fit: the keys and values of {slots[1]:,} x {tokens[1]:,} tokens need {memory_text(cache)} "
        f"in {dtype} beside weights of {memory_text(weights)}, and this machine has {memory_text(total)}{copy_of_it}"
    )
    yield Problem(
        flag,
        message,
        f"use at most {fits:,}" if fits else f"lower {slots[0]} and {tokens[0]}",
        {flag: fits} if fits else {},
    )


def cache_bytes(shape: ModelShape, dtype: str) -> int:
    """Return the bytes of the keys and values of one token, over all ranks."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * FLOATS[dtype].size_bytes
