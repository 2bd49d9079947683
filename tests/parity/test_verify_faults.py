"""`megalite verify` finds each planted fault of a layout's ranks, and names the tensor or quantity that is guilty."""

import ast
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import pytest

from tests.support.parity import ZERO_RTOL
from tests.support.selection import cases
from tests.support.verification import verified, verifier
from tests.support.verify_faults import DP, LORA, MORE, NAMED, PAINS, ZERO

FAULTS = {**PAINS, **MORE}
# One of each kind; several have the same run without a fault.
CORE = (
    "loss off by the logarithm of the tensor ranks",
    "norm without the norms' weights",
    "missing all-reduce of column-parallel input gradients",
    "30 layers on 4 stages train 28",
    "ZeRO 2 drops micro steps that it has reduced",
    "packed documents seen over context ranks",
)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with verifier() as process:
        yield process


@pytest.fixture(scope="module")
def require_certificate_without_fault(process):
    """Several faults are shown by the same run, which is verified once."""

    @cache
    def require(shown_by: str) -> None:
        certificate = process.submit(verified, ast.literal_eval(shown_by)).result()
        assert certificate.holds, certificate.departure

    return lambda settings: require(repr(dict(settings)))


def test_they_are_those_that_users_reported_and_at_least_twenty_more():
    assert len(PAINS) >= 10 and len(MORE) >= 20 and not PAINS.keys() & MORE.keys()
    assert FAULTS.keys() == NAMED.keys()


@pytest.mark.parametrize("name", cases(FAULTS, core=CORE))
def test_it_finds_a_planted_fault_and_names_the_guilty(process, require_certificate_without_fault, name):
    fault = FAULTS[name]
    require_certificate_without_fault(fault.settings)
    certificate = process.submit(verified, fault.settings, name).result()
    assert not certificate.holds, f"{name} is not found"
    assert certificate.departure.startswith(NAMED[name]), certificate.departure


@pytest.mark.parametrize(
    ("fault", "settings", "most"),
    [
        ("missing all-reduce of column-parallel input gradients", {"training.precision": "bf16"}, 0.2),
        ("experts not summed over their copies", {"training.precision": "bf16"}, 0.2),
        (
            "groups of parameters forgotten",
            {"training.precision": "bf16", "model.family": "gemma3_text"},
            0.6,
        ),
        ("tied copies that drift under ZeRO", {}, ZERO_RTOL),
    ],
)
def test_a_coarse_number_type_hides_no_fault_and_departs_in_no_later_step(process, fault, settings, most):
    settings = {**FAULTS[fault].settings, **settings}
    later = {"precision": "run" if "training.precision" in settings else "float64", "steps": 3}
    right = process.submit(verified, settings, **later).result()
    assert right.holds and right.steps == 3, right.departure
    assert max(worst["allowed"] for worst in right.worst.values()) <= most
    assert "optimizer.eps: 1e-08 -> 0.1" in right.changed
    assert not process.submit(verified, settings, fault, **later).result().holds


def test_the_frozen_weights_that_zero_3_partitions_are_compared(process):
    zero = {f"{ZERO}.stage": 3, f"{ZERO}.stage3_param_persistence_threshold": 100}
    certificate = process.submit(verified, {**LORA, **DP, **zero}).result()
    assert certificate.holds, certificate.departure
    # The base model's 21 tensors and more of the adapter, at the start and after each of two steps.
    assert certificate.worst["weights"]["tensors"] == 2 * certificate.worst["initial weights"]["tensors"] > 42
