"""Context parallelism: the cut of a sequence, what each method of attention sends and keeps, and the choice. No torch.

Sources: Liu et al. 2023, "Ring attention with blockwise transformers" (ring); Llama Team 2024, "The Llama 3 herd of
models", section 3.3.2 (gather); Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple, get_args

from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape

ContextMethod = Literal["gather", "ring", "ulysses"]
"""gather: every rank has all keys and values. ring: they go round. ulysses: ranks change tokens for heads and back."""
CONTEXT_METHODS: tuple[ContextMethod, ...] = get_args(ContextMethod)
LEAST_TOKENS = 32
"""Fewer tokens of a prompt or a window a rank are not worth the messages between ranks."""
# Blocks a rank of a row with documents (benchmarks/context_cut.py): with 8 the busiest rank works a few percent more
# than the mean, with 4 up to half as much again; 16 calls of attention cost more than they balance. Shorter blocks
# than _SHORTEST leave the tiles of attention's kernels empty.
_BLOCKS, _SHORTEST = (4, 8), 32
FAIR = 1.1
"""The work of the busiest rank over the mean above which smaller blocks pay for their calls of attention: 4 blocks take
5 to 7 % more of its time than zig-zag in all, 8 take 12 to 22 % (benchmarks/context_cut.py)."""


def zig_zag(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the blocks of each rank, of 2 * ranks equal blocks of a sequence: the r-th and the r-th from the end.

    Under a causal mask all ranks then make equally many scores.
    """
    if ranks == 1:
        return ((0,),)
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def uneven_blocks(tokens: int, ranks: int) -> tuple[range, ...]:
    """Return the blocks of `zig_zag` of any number of tokens, in order; their lengths differ by one at most."""
    count = sum(map(len, zig_zag(ranks)))
    ends = [tokens * block // count for block in range(count + 1)]
    return tuple(map(range, ends, ends[1:]))


def block_counts(length: int, ranks: int) -> tuple[int, ...]:
    """Return how many blocks of a row of `length` positions with documents a rank may have, ascending."""
    fitting = (count for count in _BLOCKS if length % (count * ranks) == 0)
    # 2 divides every row.
    return tuple(count for count in fitting if length // (count * ranks) >= _SHORTEST) or (2,)


def cut_by_work(work: Sequence[float], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the blocks of each rank, ascending and equally many, so that all ranks have nearly the same work.

    work: of each block of a row, in any unit. The largest block goes first, each to the rank with the least work
    that has room (Graham, "Bounds on multiprocessing timing anomalies", 1969). Equal work: zig-zag's fairness.
    """
    room = len(work) // ranks
    blocks: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    for block in sorted(range(len(work)), key=lambda block: (-work[block], block)):
        load, rank = heappop(loads)
        blocks[rank].append(block)
        if len(blocks[rank]) < room:
            heappush(loads, (load + work[block], rank))
    return tuple(tuple(sorted(own)) for own in blocks)


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
    def of(cls, shape: ModelShape, layout: Layout, tokens: int) -> "ContextSizes":
        tensor, context = layout.tensor, layout.context
        heads, shared = shape.num_attention_heads, max(shape.num_key_value_heads, tensor)
        # Latent attention's values travel in the width of keys.
        key_value = shared * 2 * shape.head_dim / tensor
        copies = key_value_copies(heads // tensor, max(1, shared // tensor), context)
        return cls(context, tokens, heads * shape.head_dim / tensor, key_value, copies * key_value)


def key_value_copies(heads: int, key_value_heads: int, ranks: int) -> int:
    """Return how often Ulysses sends each key-value head, so that each rank has those of its query heads."""
    if key_value_heads % ranks == 0:
        return 1
    return (ranks if ranks % key_value_heads == 0 else heads) // key_value_heads


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


class ContextChoice(NamedTuple):
    """A method, the reason for it, and the numbers that decide: values of one token in one layer, by name."""

    method: ContextMethod
    reason: str
    numbers: Mapping[str, float]


def choose_method(shape: ModelShape, layout: Layout, *, ring: bool, recomputed: bool) -> ContextChoice:
    """Return the method of `parallel.context_method = "auto"`.

    Ulysses, if its heads divide and it sends no more than gather. Else the ring, if gathered keys and values would
    take more memory than all else that a layer keeps. Else gather. Fewer bytes are sooner there on any link, so that no
    measured rate is asked: a resumed run keeps its method on other machines. ring: whether the ring may be chosen.
    recomputed: attention, so that gather keeps nothing.
    """
    sizes = ContextSizes.of(shape, layout, 1)
    heads = shape.num_attention_heads // layout.tensor
    divides = heads % layout.context == 0
    gather, ulysses = (
        context_traffic(sizes, method, recomputed=recomputed) for method in ("gather", "ulysses")
    )
    kept = context_kept(sizes, "gather", recomputed=recomputed) if ring else 0.0
    others = layer_values(shape, layout)
    sent = f"a token sends {gather:,.0f} values a layer"
    method: ContextMethod
    if divides and ulysses <= gather:
        method, reason = "ulysses", f"{heads} heads divide, and a token sends {ulysses:,.0f} values a layer"
        reason += f", {gather:,.0f} by gather"
    elif kept > others:
        reason = f"gather would keep {kept:,.0f} values a token and layer, all else {others:,.0f}"
        method = "ring"
    elif divides:
        method, reason = "gather", f"{sent}, {ulysses:,.0f} by ulysses"
    else:
        method, reason = "gather", f"{sent}; ulysses cannot divide {heads} heads by {layout.context}"
    numbers = {
        "values sent by ulysses": ulysses,
        "values sent by gather": gather,
        "values kept by gather": kept,
        "values kept of a layer": others,
    }
    return ContextChoice(method, reason, numbers)


def layer_values(shape: ModelShape, layout: Layout) -> float:
    """Return about how many values of each token a layer keeps for the backward, without those of other ranks.

    The inputs of two norms and two projections, query, key, value and attention's output, and the MLP's inside.
    """
    sizes = ContextSizes.of(shape, layout, 1)
    inside = (3 if shape.gated_mlp else 2) * shape.intermediate_size / layout.tensor
    return 4 * shape.hidden_size + 2 * sizes.query + sizes.key_value + inside
