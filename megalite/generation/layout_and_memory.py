"""Whether a model suits a layout without training, and fits this machine, before anything is loaded. No torch."""

from argparse import Namespace
from collections.abc import Iterator

from megalite.config.output.summary import memory_text
from megalite.errors import Problem
from megalite.generation.source import ModelSource
from megalite.launcher.process import has_accelerator, total_memory_bytes
from megalite.topology.axes import Layout
from megalite.topology.context import LEAST_TOKENS
from megalite.topology.dtypes import FLOATS
from megalite.topology.experts import EXPERT_AXIS, MixtureShape
from megalite.topology.parameters import model_parameters
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import divisors, tensor_sizes

CPU_DTYPE = "float32"
"""The number type of weights and computation on a CPU, unless the user names another."""
DEFAULT_TOKENS = 4096
"""The longest context of a request, prompt included, where none is asked for."""
_ONE_RANK = Layout()


def inference_layout(options: Namespace) -> Layout:
    """Return the layout that the options of a command name; its size of expert tensor parallelism follows.

    The context- and tensor-parallel ranks together hold one copy of the experts.
    """
    sharing = options.context * options.tensor
    return Layout(
        pipeline=options.pipeline,
        data=getattr(options, "data_parallel", 1),
        tensor=options.tensor,
        context=options.context,
        expert=options.expert,
        expert_tensor=max(1, sharing // options.expert) if options.expert > 1 else None,
    )


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
    yield from _expert_problems(layout, shape)
    longest = max(1, shape.longest_sequence // LEAST_TOKENS)
    if layout.context > longest:
        message = (
            f"{layout.context} ranks cannot share a sequence of the model's {shape.longest_sequence} tokens"
        )
        remedy = f"use at most {longest}, {LEAST_TOKENS} tokens a rank"
        yield Problem.reset("--context", message, remedy, longest)


def _expert_problems(layout: Layout, shape: ModelShape) -> Iterator[Problem]:
    if layout.expert == 1:
        return
    number = shape.experts.num_experts if isinstance(shape, MixtureShape) and shape.experts else 0
    if not number:
        message = f"{layout.expert} ranks divide experts, but the model has none"
        yield Problem.reset("--expert", message, "leave it out", 1)
        return
    sizes = sorted({1, *(layout.context * size for size in divisors(layout.tensor))})
    fitting = [size for size in sizes if size <= number]
    remedy = f"use {' or '.join(map(str, fitting))}"
    smaller = max(size for size in fitting if size <= layout.expert)
    if layout.expert > number:
        message = f"{layout.expert} ranks cannot divide the {number} experts of a layer"
        yield Problem.reset("--expert", message, remedy, smaller)
    elif layout.expert not in sizes:
        ranks = f"--context {layout.context} x --tensor {layout.tensor}"
        message = f"the ranks of {ranks} cannot divide the experts of a layer into {layout.expert} shares"
        remedy += " (--context times a divisor of --tensor), or more --tensor or --context ranks"
        yield Problem.reset("--expert", message, remedy, smaller)


def wider_experts(layout: Layout, shape: ModelShape) -> list[int]:
    """Return the sizes of --expert by which context-parallel ranks divide the experts that each has now."""
    number = shape.experts.num_experts if isinstance(shape, MixtureShape) and shape.experts else 0
    undivided = layout.context > 1 and layout.expert == 1
    return [layout.context] if undivided and layout.context <= number else []


def weight_bytes(source: ModelSource, dtype: str, layout: Layout) -> int:
    """Return the bytes of the weights of one copy of a model, over its tensor- and pipeline-parallel ranks.

    Where context-parallel ranks divide experts, their mean, since each has a copy of all other weights.
    """
    parameters = model_parameters(source.shape)
    experts = sum(parameter.numel for parameter in parameters if parameter.spec.axis == EXPERT_AXIS)
    divided = experts - experts // layout.context if layout.expert > 1 else 0
    of_value = 1 if source.int8 else FLOATS[dtype].size_bytes
    return (sum(parameter.numel for parameter in parameters) - divided) * of_value


def cache_problems(
    source: ModelSource,
    dtype: str | None,
    slots: tuple[str, int],
    tokens: tuple[str, int],
    *,
    layout: Layout = _ONE_RANK,
) -> Iterator[Problem]:
    """Yield the problem of a model, or of its cache, that all ranks of this machine's CPU together cannot hold.

    dtype: torch's name of it; None: the default. slots, tokens: the flag and its value: requests at a time, and tokens
    of each. layout: its ranks that share work have copies of the model and of the cache.
    """
    total = total_memory_bytes()
    if total is None or has_accelerator():
        return
    copies = layout.copies
    total, copy_of_it = total // copies, f" for each of {copies} copies" if copies > 1 else ""
    dtype = dtype or CPU_DTYPE
    shape = source.shape
    weights = weight_bytes(source, dtype, layout)
    of_token = cache_bytes(source, dtype, layout.tensor)
    cache = slots[1] * tokens[1] * of_token
    if weights + cache <= total:
        return
    if weights + min(cache, of_token) > total:
        kind = "int8" if source.int8 else dtype
        message = f"{source.folder} does not fit: its weights need {memory_text(weights)} in {kind}"
        smaller = [] if source.int8 else ["an int8 export"]
        smaller += ["--dtype bfloat16"] if kind == "float32" else []
        fewer = ["fewer context or data ranks"] if copies > 1 else []
        fewer += [f"--expert {size}" for size in wider_experts(layout, shape)[:1]]
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


def cache_bytes(source: ModelSource, dtype: str, tensor: int = 1) -> int:
    """Return the bytes of the keys and values of one token, over all ranks, `tensor` of which share its heads.

    With latent attention those of its vectors, whole on each of them, unless adapters or int8 change the matrix behind.
    """
    shape = source.shape
    values = 2 * shape.num_key_value_heads * shape.head_dim
    if isinstance(shape, MixtureShape) and shape.latent is not None and not (source.adapters or source.int8):
        values = shape.latent.cached_values * tensor
    return shape.num_hidden_layers * values * FLOATS[dtype].size_bytes
