"""Faults of gpt-oss to plant, with the settings of a `Job` that show each."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megalite.model import attention, moe
from megalite.ops import attention_sinks
from megalite.parallel import context_ring, layers
from megalite.topology.axes import Layout
from tests.support.context_faults import ContextFault, planted_context_fault
from tests.support.training import Job, RankResult, train_on_rank

_CONTEXT = Layout(context=2)


def _of_the_next_head(sink_gradients: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *results: sink_gradients(*results).roll(1)


def _for_each_block(attend_block: Callable[..., Any]) -> Callable[..., Any]:
    """Count a sink of zero once for each block of keys, not once for each query."""

    def counted(*block: Any) -> tuple[Tensor, Tensor]:
        output, lse = attend_block(*block)
        with_sink = lse.exp().add(1).log()
        return output * (lse - with_sink).exp().permute(1, 2, 0).unsqueeze(-1), with_sink

    return counted


def _of_the_first_heads(ulysses_attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(ops: Any, query: Tensor, key: Tensor, value: Tensor, form: Any, rows: Any) -> Tensor:
        first = form.sinks[: len(form.sinks) // 2].repeat(2)
        return ulysses_attention(ops, query, key, value, form=form._replace(sinks=first), rows=rows)

    return attend


def _on_every_rank(with_expert_biases: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda rows, bias, counts, **_: with_expert_biases(rows, bias, counts)


def _of_another_expert(with_expert_biases: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def biased(rows: Tensor, bias: Tensor, counts: Any, **others: Any) -> Tensor:
        return with_expert_biases(rows, bias.view(len(counts), -1).roll(1, 0).flatten(), counts, **others)

    return biased


GPT_OSS_FAULTS: Mapping[str, ContextFault] = {
    "gradient of another head's sink": ContextFault(
        attention_sinks, "sink_gradients", _of_the_next_head, {"layout": Layout(data=2)}
    ),
    "sink of every context rank": ContextFault(
        context_ring, "attend_block", _for_each_block, {"layout": _CONTEXT, "context_method": "ring"}
    ),
    "first heads' sinks on every context rank": ContextFault(
        attention,
        "METHODS",
        lambda methods: {**methods, "ulysses": _of_the_first_heads(methods["ulysses"])},
        {"layout": _CONTEXT, "context_method": "ulysses"},
    ),
    "down bias of every tensor rank": ContextFault(
        layers, "with_expert_biases", _on_every_rank, {"layout": Layout(tensor=2)}
    ),
    "biases of another expert": ContextFault(
        layers, "with_expert_biases", _of_another_expert, {"layout": Layout(data=2, expert=2)}
    ),
    "gate and up not clamped": ContextFault(
        moe,
        "clamped_swiglu",
        lambda clamped: lambda gate_up, limit: clamped(gate_up, limit=100.0),
        {"layout": Layout(data=2)},
    ),
}


def train_with_fault(job: Job, fault: str | None) -> RankResult:
    with planted_context_fault(fault, GPT_OSS_FAULTS):
        return train_on_rank(job)
