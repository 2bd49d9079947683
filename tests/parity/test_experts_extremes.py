"""Experts and ranks without rows, and all tokens to one expert, under AdamW: the numbers of one process in any layout.

DeepSpeed's issues 5066 and 5794 are hangs where the experts of a rank were idle under ZeRO 2 and 3.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megalite.config.sections.schema import OptimizerConfig
from megalite.model import moe
from megalite.topology.axes import Layout
from megalite.topology.experts import ExpertShape, MixtureShape
from megalite.train.optimizer.settings import OptimizerSettings
from tests.parity.test_experts import ALONE, DENSE, JOB
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.context_faults import ContextFault, planted_context_fault
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL
from tests.support.selection import cases
from tests.support.training import Job, RankResult, train_on_rank

EXPERTS = 8
MIXTURE = ExpertShape(EXPERTS, 2, 22, norm_topk_prob=False)
ADAMW = OptimizerSettings(OptimizerConfig(name="adamw", gradient_clipping=0.5))
ROUTED = replace(JOB, optimizer=ADAMW, learning_rate=1e-3)


@dataclass(frozen=True)
class Extreme:
    """chosen: experts of a token. favourites: all that tokens go to, by the choice alone; the weights stay."""

    chosen: int
    favourites: tuple[int, ...]

    @property
    def route(self) -> ContextFault:
        def biased(route: Callable[..., Any]) -> Callable[..., Any]:
            def of(logits: torch.Tensor, experts: ExpertShape, correction: object = None) -> Any:
                preferred = torch.zeros(EXPERTS, dtype=logits.dtype)
                preferred[list(self.favourites)] = 10
                routing = route(logits, experts, preferred)
                assert {*routing.experts.unique().tolist()} <= {*self.favourites}
                return routing

            return of

        return ContextFault(moe, "route", biased, {})


EXTREMES = {
    "an expert without rows": Extreme(2, (0, 1, 2, 4, 5, 6, 7)),
    "a rank without rows": Extreme(2, (1, 2)),
    "all tokens to one expert": Extreme(1, (6,)),
}
LAYOUTS: dict[str, Layout] = {
    "dp2 ep2": Layout(data=2, expert=2),
    "tp2 dp2 ep2, cut": Layout(tensor=2, data=2, expert=2),
}
RUNS = {
    f"{name}, ZeRO {stage}" if stage else name: replace(ROUTED, zero_stage=stage, layout=layout)
    for stage in (0, 1, 2)
    for name, layout in LAYOUTS.items()
}


def train_in_each_extreme(job: Job) -> list[RankResult]:
    """Return this rank's results in the order of EXTREMES."""
    results = []
    for extreme in EXTREMES.values():
        shape = MixtureShape(**DENSE, experts=replace(MIXTURE, num_experts_per_tok=extreme.chosen))
        with planted_context_fault("route", {"route": extreme.route}):
            results.append(train_on_rank(replace(job, shape=shape)))
    return results


@pytest.mark.parametrize("name", cases(tuple(RUNS), core=("dp2 ep2", "tp2 dp2 ep2, cut, ZeRO 2")))
def test_it_is_what_one_process_computes(ranks, name: str) -> None:
    job = RUNS[name]
    by_rank = ranks.run(train_in_each_extreme, world_size=job.layout.world_size, job=job)
    [alone] = ranks.run(train_in_each_extreme, world_size=1, job=replace(job, zero_stage=0, **ALONE))
    for extreme, expected, *results in zip(EXTREMES.values(), alone, *by_rank, strict=True):
        shape = MixtureShape(**DENSE, experts=replace(MIXTURE, num_experts_per_tok=extreme.chosen))
        rtol = ZERO_RTOL if job.zero_stage else LAYOUT_RTOL
        _assert_equal_to_one_process(replace(job, shape=shape), results, expected, rtol)
