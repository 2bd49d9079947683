"""Rules over parallel.context: sequences are cut into two equal blocks a rank, and attention crosses the cuts."""

from collections.abc import Iterator
from math import lcm

from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.derived import bucket_multiple
from megalite.errors import Problem
from megalite.topology.sharding import divisors


def context_divides_the_length(run: CheckedRun) -> Iterator[Problem]:
    context, length = run.parallel.context, run.training.sequence_length
    tensor = run.parallel.tensor if run.parallel.sequence else 1
    if context == 1:
        return
    if length % (2 * context):
        why = f"2 * parallel.context {context} = {2 * context}: a rank takes two equal blocks"
    elif length % (context * tensor):
        why = f"parallel.context {context} * parallel.tensor {tensor}, as parallel.sequence = true requires"
    else:
        return
    multiple = _multiple(context, tensor)
    nearest = [size for size in (length // multiple * multiple, -(-length // multiple) * multiple) if size]
    remedies = " or ".join(map(str, nearest))
    if fewer := max((size for size in range(1, context) if length % _multiple(size, tensor) == 0), default=0):
        remedies += f", or parallel.context {fewer}"
    yield Problem.reset(
        "training.sequence_length", f"{length} is not divisible by {why}", f"use {remedies}", nearest[0]
    )


def context_divides_the_length_buckets(run: CheckedRun) -> Iterator[Problem]:
    context, length = run.parallel.context, run.training.sequence_length
    multiple = _multiple(context, run.parallel.tensor if run.parallel.sequence else 1)
    if context == 1 or not run.data.length_buckets or length % multiple:
        return
    step = bucket_multiple(length)
    if step % multiple:
        message = (
            f"makes batches of multiples of {step} positions, but parallel.context = {context} cuts multiples of "
            f"{multiple}"
        )
        yield Problem.reset("data.length_buckets", message, "delete it, or lower parallel.context")


def ulysses_divides_the_heads(run: CheckedRun) -> Iterator[Problem]:
    context, tensor, heads = run.parallel.context, run.parallel.tensor, run.model.num_attention_heads
    if run.parallel.context_method != "ulysses" or heads % tensor or heads // tensor % context == 0:
        return
    own = f"model.num_attention_heads {heads}" + (
        f" / parallel.tensor {tensor} = {heads // tensor}" * (tensor > 1)
    )
    fitting = [size for size in divisors(heads // tensor) if size < context]
    yield Problem.reset(
        "parallel.context_method",
        f'"ulysses" gives each of parallel.context = {context} ranks equally many heads, but there are {own}',
        f'use "gather" or "ring", or parallel.context {" or ".join(map(str, fitting))}',
        "gather",
    )


def context_method_has_ranks(run: CheckedRun) -> Iterator[str]:
    if run.parallel.context == 1 and run.parallel.context_method != "auto":
        yield f'parallel.context_method = "{run.parallel.context_method}" has no effect with parallel.context = 1'


def _multiple(context: int, tensor: int) -> int:
    """Return the number that divides the length of every sequence. tensor: ranks of sequence parallelism, or 1."""
    return lcm(2 * context, context * tensor) if context > 1 else tensor
