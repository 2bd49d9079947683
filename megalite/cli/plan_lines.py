"""What `megalite plan` prints: the best layout, the next ones, the refused ones, one card, the table of sizes."""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megalite.config.output.summary import memory_text, shape_line, tokens_text
from megalite.config.sections.schema import RunConfig
from megalite.planner.cluster import GIB, Cluster, Machine
from megalite.planner.experts import context_bytes, exchanged_values
from megalite.planner.fit import BAND_LENGTH, card_fits, memory_bands, on_one_card
from megalite.planner.memory import kinds_text, stage_memory
from megalite.planner.parameter_count import ParameterCount
from megalite.planner.planned_run import PlannedRun
from megalite.planner.search import LayoutSearch, PlannedLayout, context_methods, needs_too_much
from megalite.planner.step_time import step_time
from megalite.topology.experts import MixtureShape
from megalite.topology.flops import flops_per_token
from megalite.topology.shape import ModelShape

_SHOWN = 5


def plan_lines(
    found: LayoutSearch, config: RunConfig, rows: int, cluster: Machine, options: argparse.Namespace
) -> Iterator[str]:
    shape, length, batch = config.shape(rows), config.training.sequence_length, config.batch.global_batch_size
    operations, count = flops_per_token(shape, length), ParameterCount.of(shape)
    active = f", {count.active:,} of them active" if count.active < count.total else ""
    flops = f"{operations / 1e9:,.{1 if operations > 1e10 else 3}f} GFLOP a token"
    yield f"{_model_text(config, shape)}: {count.total:,} parameters{active}, {flops}"
    nodes = "one node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    yield (
        f"{cluster.cards:,} x {cluster.card} in {nodes}; {batch:,} sequences of {length:,} = "
        f"{batch * length:,} tokens a step"
    )
    yield cluster.assumptions
    yield ""
    if found.fitting:
        yield from _best_lines(found.fitting[0], config, operations, cluster, options)
        yield ""
        yield f"{'tokens/s':>12}{'memory':>11}  layout"
        for layout in found.fitting[:_SHOWN]:
            speed = batch * length / layout.time.total
            yield f"{speed:>12,.0f}{memory_text(layout.memory.peak):>11}  {_layout_text(layout)}"
        yield ""
    yield from _refusal_lines(found, cluster)


def _best_lines(
    best: PlannedLayout, config: RunConfig, operations: int, cluster: Machine, options: argparse.Namespace
) -> Iterator[str]:
    time, memory = best.time, best.memory
    speed = config.batch.global_batch_size * config.training.sequence_length / time.total
    peak = cluster.peak(config.training.precision)
    assert peak is not None
    share = speed * operations / (peak * cluster.cards)
    yield f"best: {_layout_text(best)}"
    yield f"  memory  {memory_text(memory.peak)} of {cluster.memory_bytes // GIB} GiB on the fullest card"
    yield f"          {kinds_text(memory, config.optimizer.name)}"
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in vars(time).items() if seconds >= 0.005)
    yield f"  step    {time.total:.2f} s: {parts}"
    yield from _axes_lines(best, config, cluster)
    yield f"  speed   {speed:,.0f} tokens/s, {speed / cluster.cards:,.0f} a card, MFU {share:.0%}"
    if options.tokens:
        seconds = options.tokens / speed
        energy, cost = "", ""
        if cluster.watts is not None:
            hours = seconds / 3600 * cluster.cards * cluster.watts / 1e6
            energy = f", {hours:,.1f} MWh at the cards' full power"
        if options.price is not None:
            cost = f"; {seconds / 3600 * cluster.cards * options.price:,.0f} at {options.price:g} a card-hour"
        budget = f"{tokens_text(options.tokens)} tokens"
        yield f"  {budget}: {seconds / 86400:,.1f} days{energy}{cost}"


def _model_text(config: RunConfig, shape: ModelShape) -> str:
    """Return family and sizes, of a mixture: "32 layers of 4096, 32 heads, 8 experts, 2 of them a token"."""
    if not isinstance(shape, MixtureShape):
        return shape_line(config)
    words = [f"{shape.num_hidden_layers} layers of {shape.hidden_size}, {shape.num_attention_heads} heads"]
    if shape.latent is not None:
        words.append(f"latent attention of {shape.latent.kv_lora_rank}")
    if (experts := shape.experts) is not None:
        words.append(f"{experts.num_experts} experts, {experts.num_experts_per_tok} of them a token")
    return ", ".join(words)


def _axes_lines(best: PlannedLayout, config: RunConfig, cluster: Machine) -> Iterator[str]:
    """Yield what a card sends for its experts and its part of the sequences, in a layer and micro batch."""
    run, time = best.run, best.time
    if run.layout.expert > 1:
        sent = exchanged_values(run, recomputed=run.training.recompute == "full") * run.weight_bytes
        words = "of tokens sent by a card a layer and micro batch"
        yield f"  experts {memory_text(sent)} {words}, {time.experts:.2f} s a step"
    if run.layout.context > 1:
        words = "of keys and values sent by a card a layer and micro batch"
        others = [
            method
            for method in context_methods(config, run.shape, run.layout)
            if method != run.context_method
        ]
        runs = {method: replace(run, context_method=method) for method in others}
        waits = {method: step_time(each, cluster, best.memory).context for method, each in runs.items()}
        instead = "".join(f", by {method} {seconds:.2f}" for method, seconds in waits.items())
        yield f"  context {memory_text(context_bytes(run))} {words}, {time.context:.2f} s a step{instead}"


def _refusal_lines(found: LayoutSearch, cluster: Machine) -> Iterator[str]:
    yield (
        f"{len(found.fitting):,} layouts fit, {len(found.too_large):,} need more memory, {len(found.refused):,} are "
        "refused"
    )
    if not found.fitting and found.too_large:
        least = found.too_large[0]
        yield f"nothing fits: the smallest, {_layout_text(least)}, {needs_too_much(least, cluster)}; use more cards"
    reasons = Counter(refused.problem.key for refused in found.refused)
    for key, number in reasons.most_common(3):
        refused = next(each for each in found.refused if each.problem.key == key)
        nearest = found.nearest(refused.choice)
        instead = "" if nearest is None else f"\n    nearest: {_layout_text(nearest)}"
        yield f"  {number:,} as {refused.problem}{instead}"


def _layout_text(layout: PlannedLayout) -> str:
    choice, run = layout.choice, layout.run
    method = f" ({run.context_method})"
    sizes = [f"{name} {size}{method * (name == 'context')}" for name, size in run.layout.named_sizes.items()]
    if run.layout.expert > 1:
        sizes.append(f"expert {run.layout.expert}")
    if choice.expert_tensor is not None:
        sizes.append(f"expert tensor {choice.expert_tensor}")
    words = [" x ".join(sizes)]
    words.append(f"micro batch {run.micro_batch_size} x {run.micro_batches}")
    if choice.pipeline > 1:
        words.append(choice.schedule + (f" of {choice.chunks} chunks" if choice.chunks > 1 else ""))
    words += ["sequence parallel"] * choice.sequence + [f"ZeRO {choice.zero}"] * (choice.zero > 0)
    words += [f"recompute {choice.recompute}"] * (choice.recompute != "none")
    return ", ".join(words)


def plan_report(found: LayoutSearch, config: RunConfig, cluster: Machine) -> dict[str, Any]:
    tokens = config.batch.global_batch_size * config.training.sequence_length
    layouts = [
        {
            "settings": layout.choice.flags,
            "tokens_per_second": tokens / layout.time.total,
            "step_seconds": vars(layout.time),
            "memory_bytes": {**layout.memory.kinds, "host": layout.memory.host, "peak": layout.memory.peak},
        }
        for layout in found.fitting[:_SHOWN]
    ]
    refused = Counter(str(layout.problem) for layout in found.refused)
    return {
        "cluster": vars(cluster) if isinstance(cluster, Cluster) else {"measured": cluster.assumptions},
        "layouts": layouts,
        "fitting": len(found.fitting),
        "too_large": len(found.too_large),
        "refused": dict(refused.most_common()),
    }


def fit_lines(config: RunConfig, rows: int, cluster: Machine) -> Iterator[str]:
    run, limit = PlannedRun.of(config, rows), cluster.memory_bytes * cluster.usable
    yield f"{_model_text(config, run.shape)}, {config.training.precision}, {config.optimizer.name}"
    yield f"one {cluster.card}: {cluster.memory_bytes // GIB} GiB, of which {limit / GIB:.1f} may be planned with"
    yield f"{'recompute':<12}{f'largest micro batch of {run.sequence_length:,} tokens':>38}{'longest sequence':>20}"
    fits = list(card_fits(run, limit))
    for fit in fits:
        batch, length = (
            f"{size:,}" if size else "none" for size in (fit.micro_batch_size, fit.sequence_length)
        )
        yield f"{fit.recompute:<12}{batch:>38}{length:>20}"
    if not any(fit.micro_batch_size or fit.sequence_length for fit in fits):
        states = stage_memory(on_one_card(run), 0).states
        yield f"weights, gradients and optimizer alone take {memory_text(states)}: plan with more cards"


def table_lines() -> Iterator[str]:
    yield f"{'model':<7}{'parameters':>15}{'x 18 bytes':>13}{'activations':>13}{'logits':>10}{'peak':>10}"
    for band in memory_bands():
        memory = band.memory
        sizes = f"{memory_text(memory.states):>13}{memory_text(memory.activations):>13}{memory_text(memory.loss):>10}"
        yield f"{band.name:<7}{band.parameters:>15,}{sizes}{memory_text(memory.peak):>10}"
    yield ""
    yield "18 bytes a parameter: bf16 weights 2, fp32 gradients 4, fp32 weights 4, AdamW's moments 8."
    yield f"One sequence of {BAND_LENGTH:,} tokens at a time, selective recompute; peak: with 1 GiB for the process."
