"""Context parallelism by formula: what a rank sends and keeps of a layer whose sequences are cut over c ranks.

Sources: Liu et al. 2023, "Ring attention with blockwise transformers" (ring); Llama Team 2024, "The Llama 3 herd of
models", section 3.3.2 (gather); Jacobs et al. 2023, "DeepSpeed Ulysses". Each rank has two of 2c equal runs of a
sequence, the r-th and the r-th from the end, so that all make equal work under a causal mask.
"""

from dataclasses import dataclass

from megalite.planner.planned_run import PlannedRun
from megalite.topology.context import ContextMethod
from megalite.topology.experts import MixtureShape


@dataclass(frozen=True)
class ContextSizes:
    """Sizes of attention on one rank. ranks: c. tokens: of a micro batch on a rank, b S / c.

    query, key_value: values a token of the query (the output has as many), and of key and value together, on a
    tensor-parallel rank. spread: key_value with Ulysses, which repeats heads until each rank has one.
    """

    ranks: int
    tokens: int
    query: float
    key_value: float
    spread: float

    @classmethod
    def of(cls, run: PlannedRun) -> "ContextSizes":
        shape, tensor, context = run.shape, run.layout.tensor, run.layout.context
        heads, shared = shape.num_attention_heads, max(shape.num_key_value_heads, tensor)
        both = 2 * shape.head_dim
        if isinstance(shape, MixtureShape) and shape.latent is not None:
            both = shape.latent.qk_head_dim + shape.latent.v_head_dim
        spread = max(shared, context * tensor)
        return cls(
            context,
            run.tokens,
            heads * shape.head_dim / tensor,
            shared * both / tensor,
            spread * both / tensor,
        )


def context_traffic(sizes: ContextSizes, method: ContextMethod, *, recomputed: bool = False) -> float:
    """Return the elements that a rank sends in the forward and the backward of a layer.

    ring: keys and values go round in c - 1 sends, once more in the backward, and their gradients home in c. gather:
    to each of c - 1 ranks, and gradients back by a reduce-scatter. ulysses: query, key, value and output change
    from tokens to heads and back, with (c - 1) / c of each sent. recomputed: the forward is repeated.
    """
    others, own = sizes.ranks - 1, sizes.tokens * sizes.key_value
    if not others:
        return 0.0
    if method == "ulysses":
        exchanged = others / sizes.ranks * sizes.tokens * (2 * sizes.query + sizes.spread)
        return (3 if recomputed else 2) * exchanged
    backward = 2 * others + 1 if method == "ring" else others
    return (others * (2 if recomputed else 1) + backward) * own


def context_kept(sizes: ContextSizes, method: ContextMethod, *, recomputed: bool = False) -> float:
    """Return the elements that a layer keeps for the backward beside those of attention over a rank's own tokens.

    gather: the keys and values of all ranks, in order. ulysses: those of repeated heads. recomputed: attention is
    made again, so that nothing stays.
    """
    if recomputed or sizes.ranks == 1 or method == "ring":
        return 0.0
    if method == "gather":
        return sizes.ranks * sizes.tokens * sizes.key_value
    return sizes.tokens * (sizes.spread - sizes.key_value)


def context_working(sizes: ContextSizes, method: ContextMethod, *, recomputed: bool = False) -> float:
    """Return the elements that a layer needs meanwhile, beside what it keeps.

    ring: keys, values and their gradients on their way. Others: what recomputed attention does not keep.
    """
    if sizes.ranks == 1:
        return 0.0
    if method == "ring":
        return 2 * sizes.tokens * sizes.key_value
    return context_kept(sizes, method) if recomputed else 0.0
