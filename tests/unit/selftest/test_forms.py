"""The form that the self-test times as torch's is the one that a model with torch's operators runs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.ops import choice
from megalite.ops.choice import COMPILED, SLOTS, TORCH, Operators, OperatorSlot
from megalite.parallel.mesh import ParallelMesh
from megalite.selftest import prove
from megalite.selftest.check import Comparison, inputs_of, run
from megalite.selftest.registry import Entry, Form, Workload, cases_of
from megalite.selftest.table import ENTRIES
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from tests.support.parity import assert_close
from tests.support.tiny import FAMILY_SHAPES, tiny_batch, tiny_shape

CPU = torch.device("cpu")
LLAMA = Workload(torch.float32, 2, 12, 48, 76, 8, 4, 6, 101)
GPT = dataclasses.replace(
    LLAMA, norm="layer_norm", gated=False, hidden_act="gelu_pytorch_tanh", rotary=False, key_value_heads=8
)
OF_LLAMA = {"norm", "add_norm", "rotary", "glu", "attention", "cross_entropy"}
QWEN = dataclasses.replace(LLAMA, qk_norm=True)
Call = tuple[str, Any]
"""An operator, and the function that computed it."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> set[Call]:
    """Record which function computes each operator, from here on."""
    called: set[Call] = set()

    def recorded(operator: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any, **keywords: Any) -> Any:
            called.add((operator, function))
            return function(*arguments, **keywords)

        return record

    bound, attention = OperatorSlot.bound, choice.causal_attention
    names = {id(slot): name for name, slot in SLOTS.items()}

    def bound_and_recorded(slot: OperatorSlot, implementation: str, *, traced: bool) -> Any:
        made, name = bound(slot, implementation, traced=traced), names[id(slot)]
        if isinstance(made, str):
            return made
        if isinstance(made, tuple):
            return type(made)(*(recorded(name, part) if callable(part) else part for part in made))
        if dataclasses.is_dataclass(made) and not isinstance(made, type):
            parts = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
            return type(made)(
                **{key: recorded(name, part) if callable(part) else part for key, part in parts.items()}
            )
        return recorded(name, made)

    def attend(*arguments: Any, backend: str) -> Tensor:
        called.add(("attention", backend))
        return attention(*arguments, backend=backend)

    monkeypatch.setattr(OperatorSlot, "bound", bound_and_recorded)
    monkeypatch.setattr(choice, "causal_attention", attend)
    return called


def of_a_model(shape: ModelShape) -> None:
    """Run forward and backward of a model with torch's operators."""
    split = pipeline_split(shape.num_hidden_layers)
    replica = build_replica(
        shape, ParallelMesh.single(), split, ModelOptions(operators=Operators({})), seed=1
    )
    batch = tiny_batch(shape, 2)
    replica.stage(batch.input_ids, batch=batch).sum().backward()


def of_the_self_test(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Run what the self-test of a workload times beside a compiled operator; return the operators."""

    def run_torchs(
        forms: Mapping[str, Form], inputs: Sequence[Tensor], gradients: int, device: torch.device
    ) -> dict[str, float]:
        assert {*forms} == {COMPILED, TORCH}
        run(forms[TORCH], inputs, gradients, torch.float32)
        return {COMPILED: 2.0, TORCH: 4.0}

    monkeypatch.setattr(prove, "medians", run_torchs)
    monkeypatch.setattr(prove, "check", lambda *_: Comparison(0.0, 1.0, True))
    cases = [case for case in cases_of(ENTRIES, workload) if case.own and COMPILED in case.entry.candidates]
    for case in cases:
        candidates = {
            name: dataclasses.replace(each, why_not=lambda inputs: "")
            for name, each in case.entry.candidates.items()
        }
        case = dataclasses.replace(case, entry=dataclasses.replace(case.entry, candidates=candidates))
        assert prove.prove(case, COMPILED, CPU).ratio == 0.5
    return {case.entry.operator for case in cases}


@pytest.mark.parametrize(
    ("shape", "workload", "operators"),
    [
        (tiny_shape(layers=1), LLAMA, OF_LLAMA),
        (FAMILY_SHAPES["gpt2"], GPT, {"norm", "add_norm", "bias_gelu", "attention", "cross_entropy"}),
        (FAMILY_SHAPES["qwen3"], QWEN, OF_LLAMA),
    ],
    ids=["llama", "gpt2", "qwen3"],
)
def test_what_is_timed_is_what_a_model_runs(
    calls: set[Call],
    monkeypatch: pytest.MonkeyPatch,
    shape: ModelShape,
    workload: Workload,
    operators: set[str],
) -> None:
    timed_operators = of_the_self_test(workload, monkeypatch)
    timed = {call for call in calls if call[0] in operators}
    assert timed_operators - {"sum_of_squares"} == operators
    calls.clear()
    of_a_model(shape)
    assert calls == timed


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_what_a_model_runs_has_the_numbers_of_the_formula(entry: Entry) -> None:
    inputs = inputs_of(entry, entry.shapes[1], torch.float64, CPU, seed=3)
    if entry.operator == "bias_gelu":
        inputs[1].zero_()  # torch's linear adds it before
    ours, plain = (run(form, inputs, entry.gradients, torch.float64) for form in (entry.form(), entry.plain))
    for number, (actual, expected) in enumerate(zip(ours, plain, strict=True)):
        assert_close(actual, expected, what=f"{entry.name}, {number}")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_model_can_have_every_implementation_that_is_tested(entry: Entry) -> None:
    """A candidate without a function in the operator's slot would be torch's form, and as fast as torch."""
    functions = SLOTS[entry.operator].functions
    assert not functions or entry.candidates.keys() <= functions.keys()
