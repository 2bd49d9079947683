"""The memory of weight gradients on their way to their sums, which are counted elsewhere.

A product of a linear's backward has the type of the weights, and is added to the sum in place or by autograd, which
makes a copy in the sum's type first (parallel/gradient_sums.py). An embedding's gradient has all rows of the table, but
on the host, where the used rows are added to a sum in place.
"""

from megalite.planner.planned_run import PlannedRun
from megalite.topology.adapter import Lora
from megalite.topology.parameters import EMBEDDING, HEAD
from megalite.topology.stages import balanced_split


def trains(run: PlannedRun, name: str) -> bool:
    """Return whether a weight outside of the layers is trained."""
    adapter = run.shape.adapter
    return adapter is None or (isinstance(adapter, Lora) and adapter.trains([name]))


def table_values(run: PlannedRun) -> int:
    """Return the values of the head or the embedding on the first tensor-parallel rank."""
    return len(balanced_split(run.shape.vocab_size, run.layout.tensor)[0]) * run.shape.hidden_size


def product_bytes(run: PlannedRun, values: int) -> float:
    """Return the bytes of a linear's weight gradient of so many values beside its sum."""
    converted = run.weight_bytes < run.gradient_bytes
    if run.sums_in_place or run.micro_batches == 1:
        # The first one in the sum's type is the sum.
        return values * run.weight_bytes * converted
    return values * (run.weight_bytes + run.gradient_bytes * converted)


def waiting_bytes(run: PlannedRun) -> float:
    """Return the bytes of a tied head's gradient that autograd keeps until the embedding's comes."""
    tied = run.shape.tie_word_embeddings and run.layout.pipeline == 1 and trains(run, HEAD)
    waits = tied and (bool(run.model.chunked_loss) or not run.sums_in_place)
    return table_values(run) * run.gradient_bytes * waits


def table_bytes(run: PlannedRun) -> float:
    """Return the bytes that the embedding's gradient needs at the end of a backward, beside the sum."""
    if not trains(run, EMBEDDING):
        return 0.0
    values, converted = table_values(run), run.weight_bytes < run.gradient_bytes
    waiting = waiting_bytes(run)
    whole = values * (run.weight_bytes + run.gradient_bytes * converted)
    # Without another gradient of the table, what is converted is the sum.
    tied = run.shape.tie_word_embeddings and run.layout.pipeline == 1
    summed = tied and not waiting
    first = whole if waiting else values * run.weight_bytes * converted
    rows = run.tokens * run.shape.hidden_size * run.gradient_bytes
    later = waiting + (rows if run.on_cpu and run.sums_in_place else whole)
    if run.zero_stage >= 2:
        # Every backward has a gradient of its own; a node in Python gives one that autograd does not add to in place.
        copied = bool(run.model.chunked_loss) or run.zero_stage == 3
        return whole + waiting * copied if waiting else first
    if summed:
        return later
    return max(first, later) if run.micro_batches > 1 else first
