"""Generation and evaluation use what was tested on a card, with any number of tokens; else torch's forms."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.generation.loaded import build_model
from megalite.model.transformer import Stage
from megalite.ops import extension
from megalite.ops.choice import COMPILED, PLAIN_TORCH
from megalite.parallel.mesh import ParallelMesh
from megalite.selftest import trust
from megalite.selftest.registry import Workload, cases_of
from megalite.selftest.table import ENTRIES
from megalite.selftest.trust import CaseResult
from tests.support.tiny import tiny_shape

RIGHT = CaseResult("right", "", 1e-7, 1e-6, 0.5, 1.0)
RUN = Workload(torch.float32, 3, 64, 48, 76, 8, 4, 6, 101)
OPERATORS = ("norm", "add_norm", "rotary", "glu")


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the CPU stand for a card, whose operators need a proof."""
    monkeypatch.setenv("MEGALITE_TRUST_FOLDER", str(tmp_path))
    monkeypatch.setattr(trust, "needs_proof", lambda device_type: True)
    monkeypatch.setattr(extension, "why_not", lambda device_type: "")


def store_results(workload: Workload, wrong: Iterable[str] = ()) -> None:
    """Store what the self-test of a run finds: everything right and twice as fast, but for the wrong cases."""
    findings: dict[str, dict[str, dict[str, CaseResult]]] = {}
    for case in cases_of(ENTRIES, workload):
        for name in case.entry.candidates:
            absent = CaseResult("absent", "not installed")
            found = absent if name != COMPILED else RIGHT
            if case.entry.operator in wrong and not case.own and name == COMPILED:
                found = replace(RIGHT, verdict="wrong")
            findings.setdefault(case.entry.operator, {}).setdefault(case.key, {})[name] = found
    trust.write(trust.machine(torch.device("cpu")), findings)


def built(dtype: torch.dtype = torch.float32) -> Stage:
    return build_model(tiny_shape(layers=1), ParallelMesh.single(), dtype).stage


def test_without_results_it_is_torch() -> None:
    assert built().whole.ops == PLAIN_TORCH


def test_a_run_of_these_sizes_was_tested_with_other_tokens() -> None:
    store_results(RUN)
    operators = built().whole.ops
    assert {name for name in OPERATORS if operators.uses(name)} == {*OPERATORS}
    assert not operators.uses("attention"), "the self-test has no key-value cache"


@pytest.mark.parametrize(
    "other",
    [replace(RUN, hidden_size=64, intermediate_size=80, head_dim=8), replace(RUN, dtype=torch.bfloat16)],
    ids=["other sizes", "another type"],
)
def test_another_run_proves_nothing(other: Workload) -> None:
    store_results(other)
    assert not any(built().whole.ops.uses(name) for name in OPERATORS)


def test_what_was_wrong_at_odd_sizes_is_torchs() -> None:
    store_results(RUN, wrong=["rotary"])
    operators = built().whole.ops
    assert [name for name in OPERATORS if operators.uses(name)] == ["norm", "add_norm", "glu"]
