"""Context parallelism: which parts of a sequence each rank has, and how attention reaches the others. Without torch."""

from typing import Literal, get_args

ContextMethod = Literal["gather", "ring", "ulysses"]
"""gather: every rank has all keys and values (Llama Team, "The Llama 3 herd of models", 2024, section 3.3.2).
ring: they go round (Liu et al., "Ring attention with blockwise transformers", 2023).
ulysses: ranks change tokens for heads and back (Jacobs et al., "DeepSpeed Ulysses", 2023)."""
CONTEXT_METHODS: tuple[ContextMethod, ...] = get_args(ContextMethod)


def zig_zag(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the blocks of each rank, of 2 * ranks equal blocks of a sequence: the r-th and the r-th from the end.

    Under a causal mask all ranks then make equally many scores.
    """
    if ranks == 1:
        return ((0,),)
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
