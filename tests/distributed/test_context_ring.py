"""Ring attention computes what one process does, with the traffic that the planner counts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.kernels import needs_library
from tests.support.parity import OPERATOR_RTOL, assert_close, assert_no_worse
from tests.support.rings import (
    DOCUMENTS,
    RING_FAULTS,
    RingCase,
    faulty_on_rank,
    positions,
    ring_on_rank,
    traffic_on_rank,
)

CASES = {
    "causal": RingCase(),
    "one head each": RingCase(rows=1, kv_heads=4),
    "window": RingCase(window=7),
    "a window of two": RingCase(window=2),
    "documents": RingCase(documents=DOCUMENTS),
    "documents in a window, dropped": RingCase(window=9, documents=DOCUMENTS, dropout=True),
    "dropped": RingCase(dropout=True, scale=0.3),
}
IN_TORCH = {
    **CASES,
    "soft cap": RingCase(softcap=2.0),
    "soft cap in a window": RingCase(softcap=1.5, window=7, scale=0.5),
    "soft cap, documents, dropped": RingCase(softcap=2.0, documents=DOCUMENTS, dropout=True),
}
IN_CHUNKS = {
    "chunks of queries": RingCase(length=512, window=150, dropout=True, documents=((7, 300, 205), (256, 256)))
}
NAMES = ("output", "query", "key", "value")


def _whole(results: list[list[Tensor]], length: int) -> list[Tensor]:
    """Put the tensors of all ranks together."""
    order = torch.cat([positions(rank, len(results), length) for rank in range(len(results))]).argsort()
    return [torch.cat(shards, dim=1)[:, order] for shards in zip(*results, strict=True)]


def _run(ranks, cases: dict[str, RingCase], size: int, run=ring_on_rank) -> dict[str, list[Tensor]]:
    results = ranks.run(run, world_size=size, cases=[*cases.values()])
    by_case = zip(cases.items(), zip(*results, strict=True), strict=True)
    return {name: _whole([*shards], case.length) for (name, case), shards in by_case}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=needs_library)], ids=["torch", "compiled"]
)
def test_it_is_attention_over_whole_sequences(ranks, size, compiled) -> None:
    cases = {**(CASES if compiled else IN_TORCH), **IN_CHUNKS}
    cases = {name: replace(case, compiled=compiled) for name, case in cases.items()}
    for case, ours in _run(ranks, cases, size).items():
        alone = cases[case].attend_alone(torch.float64)
        for what, tensor, reference in zip(NAMES, ours, alone, strict=True):
            assert_close(tensor, reference, rtol=OPERATOR_RTOL, what=f"{case}: {what}")


@needs_library
def test_low_precision_is_no_worse_than_one_process(ranks) -> None:
    low = {
        f"{dtype}, compiled: {compiled}": RingCase(compiled, dtype=dtype, documents=DOCUMENTS, dropout=True)
        for dtype in (torch.float32, torch.bfloat16)
        for compiled in (False, True)
    }
    for name, ours in _run(ranks, low, 4).items():
        assert all(tensor.dtype == low[name].dtype for tensor in ours)
        wide, own = (low[name].attend_alone(dtype) for dtype in (torch.float64, low[name].dtype))
        for what, tensor, naive, exact in zip(NAMES, ours, own, wide, strict=True):
            assert_no_worse(tensor, naive, exact, what=f"{name}: {what}")


@pytest.mark.parametrize("size", [2, 4])
def test_traffic_is_that_of_the_formula(ranks, size) -> None:
    case = RingCase(window=3, documents=DOCUMENTS)
    keys_and_values = 2 * case.rows * case.length // size * case.kv_heads * 8
    sent = ranks.run(traffic_on_rank, world_size=size, case=case)
    assert sent == [(3 * size - 2) * keys_and_values] * size


def test_planted_faults_depart_from_one_process(ranks) -> None:
    cases = {name: case for name, (case, _) in RING_FAULTS.items()}
    for fault, ours in _run(ranks, cases, 4, faulty_on_rank).items():
        alone = cases[fault].attend_alone(torch.float64)
        errors = [float((one - other).abs().max()) for one, other in zip(ours, alone, strict=True)]
        assert max(errors) > 1e-3, f"{fault}: {dict(zip(NAMES, errors, strict=True))}"
