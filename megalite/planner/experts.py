"""Mixtures of experts by formula: what their layers keep and exchange, and how their gradients are reduced.

The data, context and tensor ranks of a stage are laid out again as copies x expert x expert tensor, the last innermost
(Megatron-Core's "parallel folding"). Tokens reach their experts by an all-to-all and return by another one: Lepikhin et
al. 2020, "GShard".
"""

from dataclasses import replace
from math import ceil

from megalite.config.output.summary import memory_text
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.training_section import RecomputeMode
from megalite.planner.activations import Activations, layer_activations
from megalite.planner.cluster import Cluster
from megalite.planner.planned_run import PlannedRun
from megalite.planner.stage_parameters import ZeroShares, stage_counts
from megalite.topology.adapter import Lora
from megalite.topology.context import ContextSizes, context_kept, context_traffic, context_working
from megalite.topology.dtypes import PRECISIONS
from megalite.topology.experts import ExpertShape, LatentAttention, MixtureShape

IMBALANCE = 1.3
"""The rows of the fullest rank over the mean, once the router is trained; before, up to the number of expert ranks."""


def block_activations(run: PlannedRun, mode: RecomputeMode, layer: int) -> Activations:
    """Return the activations of a layer of any kind, with what cut sequences, latent attention and experts add."""
    shape, method = run.shape, run.context_method
    if not isinstance(shape, MixtureShape) and run.layout.context == 1:
        return layer_activations(run, mode, layer)
    sizes, again = ContextSizes.of(run.shape, run.layout, run.tokens), mode != "none"
    kept = context_kept(sizes, method, recomputed=again)
    working = context_working(sizes, method, recomputed=again)
    if run.layout.context > 1 and method != "ring" and not again:
        # Attention saves its output, and its projection the output in order.
        kept += sizes.tokens * sizes.query
    if isinstance(shape, MixtureShape):
        run = replace(run, shape=shape.dense_layer(layer))
        block = latent_values(run, shape.latent, mode) if shape.latent is not None else 0.0
        if shape.experts is not None and shape.has_experts(layer):
            block += sum(expert_values(run, shape.experts).values())
            block += adapter_values(run, shape.experts, layer)
        # Full recomputation makes them again.
        kept, working = (kept, working + block) if mode == "full" else (kept + block, working)
    plain, size = layer_activations(run, mode, layer), run.weight_bytes
    forward, backward = plain.forward + working * size, plain.backward + working * size
    return Activations(plain.kept + kept * size, plain.deferred, forward, backward)


def routed_tokens(run: PlannedRun) -> float:
    """Return the tokens that a rank sends to experts: with a cut of each expert all tokens of its tensor group."""
    return run.tokens / (run.layout.tensor if run.cut_of_experts == 1 else 1)


def expert_values(run: PlannedRun, experts: ExpertShape) -> dict[str, float]:
    """Return name -> values that the experts of a layer keep of a micro batch on the fullest rank.

    Rows are kept where they arrive, not where they are sent.
    """
    hidden = run.shape.hidden_size
    tokens = routed_tokens(run)
    rows = tokens * experts.num_experts_per_tok
    arrived = rows * (IMBALANCE if run.layout.expert > 1 else 1)
    inner = 3 * experts.moe_intermediate_size / run.cut_of_experts
    return {
        "arrived rows": arrived * hidden,
        "gate, up and their product": arrived * inner,
        "returned rows": rows * hidden,
        "router's logits": tokens * experts.num_experts,
    }


def adapter_values(run: PlannedRun, experts: ExpertShape, layer: int) -> float:
    """Return the values that low-rank adapters of a layer's experts keep: products with A, and B in blocks."""
    adapter = run.shape.adapter
    if not isinstance(adapter, Lora):
        return 0.0
    names = [f"model.layers.{layer}.mlp.experts.0.{name}_proj" for name in ("gate", "up", "down")]
    *up, down = (adapter.rank * adapter.adapts(name) for name in names)
    rows = routed_tokens(run) * experts.num_experts_per_tok * (IMBALANCE if run.layout.expert > 1 else 1)
    held = ceil(experts.num_experts / run.layout.expert)
    blocks = held * 2 * experts.moe_intermediate_size / run.cut_of_experts * sum(up)
    return rows * (sum(up) + down) + blocks


def latent_values(run: PlannedRun, latent: LatentAttention, mode: RecomputeMode) -> float:
    """Return the values that latent attention keeps beside those of its heads, whose values are as wide as keys.

    Both vectors before and after their norms, the rotated key, and attention's output without its padding, which the
    output projection reads: where attention is recomputed, in place of the padded one.
    """
    vectors = 2 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank) + latent.qk_rope_head_dim
    padded = 0 if mode == "none" else latent.qk_head_dim
    heads = run.shape.num_attention_heads / run.layout.tensor
    return run.positions * vectors + run.tokens * heads * (latent.v_head_dim - padded)


def exchanged_values(run: PlannedRun, *, recomputed: bool = False) -> float:
    """Return the elements that a rank sends to other ranks for the experts of a layer and a micro batch.

    Rows go to their experts and back, and their gradients the same ways. recomputed: the forward's once more.
    """
    experts, ranks = _experts(run), run.layout.expert
    rows = routed_tokens(run) * experts.num_experts_per_tok * run.shape.hidden_size
    return (6 if recomputed else 4) * rows * (ranks - 1) / ranks


def exchange_of_a_token(config: RunConfig) -> str:
    """Return in words what experts exchange in a step of a resolved run; "" where all are on each rank.

    The load is even, and the precision has 16 bits where it is not known yet.
    """
    shape, ranks = config.shape(0), config.layout.expert
    if ranks == 1 or not isinstance(shape, MixtureShape) or shape.experts is None:
        return ""
    training, layers = config.training, sum(map(shape.has_experts, range(shape.num_hidden_layers)))
    rows = (6 if training.recompute == "full" else 4) * layers * shape.experts.num_experts_per_tok
    size = 2 if training.precision == "auto" else PRECISIONS[training.precision].size_bytes
    values = rows * shape.hidden_size * (ranks - 1) / ranks
    return f"experts: {memory_text(values * size)} a token and step"


def exchange_seconds(run: PlannedRun, cluster: Cluster) -> float:
    """Return the time of a layer's all-to-alls of tokens in a micro batch."""
    ranks, stride = run.layout.expert, run.cut_of_experts
    if ranks == 1:
        return 0.0
    size = exchanged_values(run, recomputed=run.training.recompute == "full") * run.weight_bytes
    return _all_to_all_seconds(size, cluster, ranks, stride)


def _all_to_all_seconds(size: float, cluster: Cluster, ranks: int, stride: int) -> float:
    """Return the time in which each rank sends `size` bytes to the others: the slower of links and network."""
    inside = min(ranks, max(1, cluster.cards_per_node // stride))
    leaving = (ranks - inside) / (ranks - 1)
    link = (1 - leaving) * size / cluster.bandwidth(inside, stride)
    return max(link, leaving * size / cluster.bandwidth(ranks, stride, ring=False) if leaving else 0.0)


def context_bytes(run: PlannedRun) -> float:
    """Return the bytes that one of several ranks sends of a layer and a micro batch to those that share its sequences.

    The ring's c sends of gradients are in fp32 at least, so that their sums are not rounded on the way.
    """
    sizes = ContextSizes.of(run.shape, run.layout, run.tokens)
    sent = context_traffic(sizes, run.context_method, recomputed=run.training.recompute != "none")
    wider = run.exact_bytes - run.weight_bytes if run.context_method == "ring" else 0
    return sent * run.weight_bytes + sizes.ranks * sizes.tokens * sizes.key_value * wider


def context_seconds(run: PlannedRun, cluster: Cluster, attention: float = 0.0) -> float:
    """Return the time for which a layer waits for keys and values, or heads, of other ranks in a micro batch.

    attention: seconds that its attention computes. The ring's messages travel meanwhile, but for the first part of it,
    for which nothing is under way, and for the last sums of gradients on their way home. The others wait for theirs.
    """
    ranks, stride, sent = run.layout.context, run.layout.tensor, context_bytes(run)
    if ranks == 1:
        return 0.0
    if run.context_method == "ulysses":
        return _all_to_all_seconds(sent, cluster, ranks, stride)
    if run.context_method == "gather":
        return sent / cluster.bandwidth(ranks, stride)
    sizes, rate = (
        ContextSizes.of(run.shape, run.layout, run.tokens),
        cluster.bandwidth(ranks, stride, ring=False),
    )
    last = sizes.tokens * sizes.key_value * run.exact_bytes / rate
    return last + max(0.0, sent / rate - last - attention * (ranks - 1) / ranks)


def layers_with_experts(run: PlannedRun) -> int:
    """Return the most layers with experts on the first, the middle and the last stage."""
    shape, last = run.shape, run.split.stages - 1
    if not isinstance(shape, MixtureShape):
        return 0
    return max(
        sum(map(shape.has_experts, run.split.layers_of(stage))) for stage in {0, run.split.stages // 2, last}
    )


def reduction_factors(run: PlannedRun) -> tuple[float, float]:
    """Return factors of the traffic of weights and gradients over all replicas: experts have fewer copies.

    A ring of n ranks moves (n - 1) / n of the whole, once for each reduction or gather.
    """
    counts = stage_counts(run, run.split.stages // 2)
    if counts.experts is None:
        return 1.0, 1.0
    shares, copies, expert_copies = ZeroShares.of(run, counts), run.copies, run.expert_copies

    def factor(values: int, of_experts: int, on_rank: float, from_stage: int) -> float:
        moved = (values - of_experts) * (copies - 1) / copies + of_experts * (
            expert_copies - 1
        ) / expert_copies
        whole = on_rank * (copies if run.zero_stage >= from_stage else 1)
        return moved / (whole * (copies - 1) / copies)

    experts = counts.experts
    return (
        factor(counts.weights, experts.weights, shares.weights, 3),
        factor(counts.trained, experts.trained, shares.gradients, 2),
    )


def _experts(run: PlannedRun) -> ExpertShape:
    assert isinstance(run.shape, MixtureShape) and run.shape.experts is not None
    return run.shape.experts
