"""The self-test runs the compiled operators themselves that a run calls: a fault planted in one of them is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.ops import attention
from megalite.ops.choice import ALL_COMPILED, COMPILED
from megalite.parallel.mesh import ParallelMesh
from megalite.selftest.check import check
from megalite.selftest.decide import workload_of_model
from megalite.selftest.prove import prove
from megalite.selftest.registry import FLOATS, Case, cases_of
from megalite.selftest.table import ENTRIES
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from tests.support.counting import kernels
from tests.support.kernels import needs_library
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES, tiny_batch, tiny_shape

CPU = torch.device("cpu")
SHAPES = {
    "llama": tiny_shape(layers=1),
    "qwen3": FAMILY_SHAPES["qwen3"],
    "mixtral": MIXTURE_SHAPES["mixtral"],
}

pytestmark = needs_library


def cases_for(shape: ModelShape) -> list[Case]:
    """Return the cases of a run of two rows that have a compiled form."""
    run = replace(workload_of_model(shape, torch.float32, 1), rows=2, sequence=8)
    return [case for case in cases_of(ENTRIES, run) if COMPILED in case.entry.candidates]


def compiled_of(work: Callable[[], object]) -> set[str]:
    """Return the library's operators that ran meanwhile."""
    return {name for name in kernels(work) if hasattr(torch.ops.megalite, name)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_compiled_operator_that_a_model_calls_is_run(shape: ModelShape) -> None:
    options = ModelOptions(operators=ALL_COMPILED)
    split = pipeline_split(shape.num_hidden_layers)
    replica = build_replica(shape, ParallelMesh.single(), split, options, seed=1)
    batch = tiny_batch(shape, 2)

    def of_the_model() -> None:
        replica.stage(batch.input_ids, batch=batch).sum().backward()
        with torch.no_grad():
            replica.stage(batch.input_ids, batch=batch)

    def of_the_self_test() -> None:
        for case in cases_for(shape):
            for dtype in case.entry.dtypes:
                check(case.entry, COMPILED, case.shapes[0], dtype, CPU)

    called = compiled_of(of_the_model)
    assert {name for name in called if name.startswith("rotary")} == (
        {"rotary"} if shape.qk_norm else {"rotary_", "rotary_split", "rotary_split_backward"}
    )
    assert called <= compiled_of(of_the_self_test)


def _off(function: Callable[..., Any], *, inverse: bool) -> Callable[..., Any]:
    """Return a rotation that is off by a hundredth, forward or backward."""

    def rotated(*inputs: Any) -> Any:
        made: tuple[Tensor, ...] = function(*inputs)
        return tuple(1.01 * each for each in made) if inputs[-1] == inverse else made

    return rotated


@pytest.mark.parametrize("fault", ["in place", "forward", "backward"])
def test_a_wrong_rotation_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    cases = cases_for(SHAPES["llama" if fault == "in place" else "qwen3"])
    if fault == "in place":
        monkeypatch.setattr(torch.ops.megalite, "rotary_", lambda *inputs: None)
    else:
        wrong = _off(torch.ops.megalite.rotary, inverse=fault == "backward")
        monkeypatch.setattr("megalite.ops.rotary.rotated_pair", wrong)
    verdicts = {
        (case.entry.name, prove(case, COMPILED, CPU).verdict)
        for case in cases
        if case.entry.operator == "rotary" and not case.own
    }
    of_llama = {("rotary embedding, halves", "right"), ("rotary embedding, in place", "wrong")}
    assert verdicts == (of_llama if fault == "in place" else {("rotary embedding, split heads", "wrong")})


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("form", ["causal", "sliding window", "packed documents", "dropped"])
def test_a_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch, form: str, dtype: torch.dtype) -> None:
    """Also where a model on a CPU leaves the call to torch, which is faster there."""
    [entry] = [each for each in ENTRIES if each.name == f"attention, {form}"]
    packed = attention.packed_attention
    assert check(entry, COMPILED, entry.shapes[1], dtype, CPU).share <= 1
    monkeypatch.setattr(
        attention, "packed_attention", lambda *given, **more: [each * 0 for each in packed(*given, **more)]
    )
    assert check(entry, COMPILED, entry.shapes[1], dtype, CPU).share > 1
