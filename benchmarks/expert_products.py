"""A layer's experts, forward and backward, beside the experts of transformers' Qwen3-MoE on the same cores.

    python -m benchmarks.expert_products [--quick]

From tokens and chosen experts to the weighted sums, and the gradients of tokens, of the choice's weights and of the
experts. The forms take turns on one thread; a figure is the median of their times on the processor. "torch rows" is our
own form with rows and sums by torch's operators; "rows" are those alone, forward and backward.
"first": no gradients yet. "later": a micro batch whose gradients are added to those of earlier ones.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import report
from megalite.launcher.process import keep_freed_memory
from megalite.ops import extension
from megalite.ops.activations import COMPILED_GLU, TORCH_GLU
from megalite.ops.adamw import add_weight_gradient_, compiled_add_weight_gradient_
from megalite.ops.expert_rows import RowOrder, rows_of_tokens, tokens_of_rows
from megalite.ops.router import Routing, route
from megalite.parallel.experts import expert_linear, expert_mlp, through_experts
from megalite.parallel.gradient_sums import WeightGradients
from megalite.parallel.mesh import ALONE
from megalite.topology.experts import ExpertShape

ROUNDS = 3


class Sizes(NamedTuple):
    """tokens, hidden size, experts, chosen experts of a token, width of an expert."""

    tokens: int
    hidden: int
    experts: int
    chosen: int
    width: int


SHAPES = {
    "8 rows an expert": Sizes(64, 512, 32, 4, 256),
    "64 rows": Sizes(512, 512, 32, 4, 256),
    "256 rows": Sizes(1024, 512, 16, 4, 512),
    "512 rows": Sizes(2048, 512, 8, 2, 512),
    "512 rows, narrow experts": Sizes(4096, 512, 64, 8, 128),
}
QUICK = {"4 rows an expert": Sizes(16, 64, 8, 2, 32)}
THEIRS = ("eager", "grouped_mm")
TORCH_ROWS, ROWS, ROWS_BY_TORCH = "torch rows", "rows", "rows by torch"
COLUMNS = {
    **{name: name for name in ("shape", "type", "moment", "ms")},
    **{name: f"{name} ms" for name in THEIRS},
    **{f"{name} x": f"{name} / ours" for name in (*THEIRS, TORCH_ROWS)},
    **{ROWS: f"{ROWS} ms", f"{ROWS} x": f"{ROWS_BY_TORCH} / ours"},
}


class Form(NamedTuple):
    """run: (tokens [T, H], weights of the choice [T, k]) -> [T, H]. experts: its parameters."""

    run: Callable[[Tensor, Tensor], Tensor]
    experts: Sequence[Tensor]


def _theirs(stacked: Sequence[Tensor], sizes: Sizes, routing: Routing, implementation: str) -> Form:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.chosen,
        moe_intermediate_size=sizes.width,
    )
    config._experts_implementation = implementation
    experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = (torch.nn.Parameter(weight.clone()) for weight in stacked)
    return Form(lambda tokens, weights: experts(tokens, routing.experts, weights), [*experts.parameters()])


def _ours(stacked: Sequence[Tensor], routing: Routing, compiled_rows: bool) -> Form:
    compiled = extension.available("cpu")
    gradients = WeightGradients(compiled_add_weight_gradient_ if compiled else add_weight_gradient_)
    activation = (COMPILED_GLU if compiled else TORCH_GLU).swiglu
    experts = [weight.flatten(0, 1).clone().requires_grad_() for weight in stacked]

    gate_up, down = (partial(expert_linear, weight=weight, gradients=gradients) for weight in experts)

    def compute(rows: Tensor, counts: Sequence[int]) -> Tensor:
        return expert_mlp(rows, counts, gate_up, down, activation)

    def run(tokens: Tensor, weights: Tensor) -> Tensor:
        chosen = Routing(routing.experts, weights, routing.shares, routing.counts)
        return through_experts(tokens, chosen, ALONE, compute, compiled=compiled_rows)

    return Form(run, experts)


def _rows_alone(routing: Routing, compiled: bool) -> Form:
    def run(tokens: Tensor, weights: Tensor) -> Tensor:
        order = RowOrder.of(routing.experts, compiled)
        return tokens_of_rows(rows_of_tokens(tokens, order), weights, order)

    return Form(run, ())


def _seconds(form: Form, inputs: Sequence[Tensor], grad: Tensor, later: bool) -> float:
    if not later:
        for expert in form.experts:
            expert.grad = None
    started = time.process_time()
    form.run(*inputs).backward(grad)
    return time.process_time() - started


def _measure(name: str, sizes: Sizes, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    tokens = torch.randn(sizes.tokens, sizes.hidden).to(dtype).requires_grad_()
    grad = torch.randn(sizes.tokens, sizes.hidden).to(dtype)
    routing = route(
        torch.randn(sizes.tokens, sizes.experts), ExpertShape(sizes.experts, sizes.chosen, sizes.width)
    )
    stacked = [
        torch.randn(sizes.experts, *shape).mul_(shape[1] ** -0.5).to(dtype)
        for shape in ((2 * sizes.width, sizes.hidden), (sizes.hidden, sizes.width))
    ]
    inputs = tokens, routing.weights.to(dtype).requires_grad_()
    compiled = extension.available("cpu")
    forms = {"ms": _ours(stacked, routing, compiled), TORCH_ROWS: _ours(stacked, routing, False)}
    forms |= {each: _theirs(stacked, sizes, routing, each) for each in THEIRS}
    forms |= {ROWS: _rows_alone(routing, compiled), ROWS_BY_TORCH: _rows_alone(routing, False)}
    rows = []
    for moment in ("first", "later"):
        times: dict[str, list[float]] = {each: [] for each in forms}
        for turn in range(rounds + 1):
            for label, form in forms.items():
                if (
                    not form.experts
                ):  # so short that they would measure what the form before left in the caches
                    form.run(*inputs).backward(grad)
                seconds = _seconds(form, inputs, grad, moment == "later")
                if turn:  # libraries allocate memory on first use
                    times[label].append(seconds)
        medians = {each: statistics.median(of_form) for each, of_form in times.items()}
        rows.append(
            {
                **{"shape": name, "type": str(dtype).removeprefix("torch."), "moment": moment},
                **{each: round(seconds * 1e3, 2) for each, seconds in medians.items()},
                **{f"{each} x": round(medians[each] / medians["ms"], 2) for each in (*THEIRS, TORCH_ROWS)},
                f"{ROWS} x": round(medians[ROWS_BY_TORCH] / medians[ROWS], 2),
            }
        )
    return rows


def main() -> None:
    options = report.arguments(__doc__)
    torch.set_num_threads(1)
    keep_freed_memory()
    facts, rows = report.machine(), []
    for name, sizes in (QUICK if options.quick else SHAPES).items():
        for dtype in (torch.float32, torch.bfloat16):
            rows += _measure(name, sizes, dtype, 2 if options.quick else ROUNDS)
    report.show("experts, forward and backward, one thread", rows, COLUMNS)
    shapes = {name: sizes._asdict() for name, sizes in SHAPES.items()}
    settings = {"quick": options.quick, "threads": 1, "shapes": shapes}
    report.write("expert-products", facts, settings, rows, options.results)


if __name__ == "__main__":
    main()
