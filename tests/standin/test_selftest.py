"""The self-test on an accelerator: worker, devices, clock and choice, on the stand-in."""

from pathlib import Path

import pytest
import torch

from megalite.selftest import trust
from megalite.selftest.decide import choices_of, proved_choices
from megalite.selftest.registry import Workload, cases_of
from megalite.selftest.run import prove_all
from megalite.selftest.table import entries_of
from tests.support.kernels import needs_library

FILE = Path(__file__).parents[1] / "support" / "standin_operators.py"
WORKLOAD = Workload(torch.bfloat16, 2, 16, 32, 64, 4, 2, 8, 101)


def prove() -> tuple[trust.Findings, dict[str, trust.OperatorChoice], dict[str, str]]:
    device = torch.device("standin", 0)
    cases = cases_of(entries_of(FILE), WORKLOAD)
    found = prove_all(cases, device, entries=FILE)
    return found, choices_of(cases, found), trust.machine(device)


def prove_what_is_not_there() -> tuple[dict[str, trust.OperatorChoice], str]:
    return proved_choices(WORKLOAD, torch.device("standin", 0))


@needs_library
@pytest.mark.extended
def test_operators_prove_themselves_on_an_accelerator(devices) -> None:
    ((found, choices, facts),) = devices.run(prove, world_size=1)
    assert (facts["device"], facts["card"]) == ("standin", "stand-in")
    for operator in ("norm", "glu", "rotary", "adamw", "sum_of_squares"):
        verdicts = {case: each["megalite"] for case, each in found[operator].items()}
        assert all(each.right for each in verdicts.values()), verdicts
        timed = {case for case, each in verdicts.items() if each.seconds and each.torch_seconds}
        own = {case for case in verdicts if not case.endswith("odd sizes")}
        assert own and timed == own, "a run's own shapes are timed, odd sizes are not"
    assert choices["cross_entropy"].name == choices["bias_gelu"].name == "torch"
    assert choices["cross_entropy"].why.startswith("wrong: error ")
    assert "failed: RuntimeError: " in choices["bias_gelu"].why and "device" in choices["bias_gelu"].why


def test_where_nothing_is_compiled_nothing_runs(devices) -> None:
    ((choices, note),) = devices.run(prove_what_is_not_there, world_size=1)
    assert note == "" and {choice.name for choice in choices.values()} == {"torch"}
    assert choices["norm"].why == "there are none for devices of type standin"
    assert not choices["norm"].faults
