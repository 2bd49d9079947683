"""What "auto" becomes, and what a slow choice is told."""

import time

import pytest
import torch

from megalite.train import precision
from megalite.train.precision import Precision, choose_precision

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[torch.dtype, float]:
    """Seconds of a product by type, as the machine is made to have them."""
    seconds = {torch.float32: 1.0, torch.bfloat16: 8.0, torch.float16: 50.0}
    monkeypatch.setattr(precision, "product_seconds", seconds.__getitem__)
    return seconds


def test_auto_is_what_is_clearly_faster_on_a_cpu(machine: dict[torch.dtype, float]) -> None:
    assert choose_precision("auto", CPU) == Precision("fp32")
    machine[torch.bfloat16] = 0.9
    assert choose_precision("auto", CPU) == Precision("fp32")
    machine[torch.bfloat16] = 0.25
    note = 'training.precision: "auto" is "bf16", 4.0 times as fast here as "fp32"'
    assert choose_precision("auto", CPU) == Precision("bf16", note)


def test_a_run_that_goes_on_keeps_its_precision_under_auto_alone(machine: dict[torch.dtype, float]) -> None:
    machine[torch.bfloat16] = 0.25
    kept = choose_precision("auto", CPU, "fp32")
    assert kept.name == "fp32" and "as the run began" in kept.note
    assert choose_precision("bf16", CPU, "fp32") == Precision("bf16")
    # A checkpoint of another tool says nothing of it.
    assert choose_precision("auto", CPU, None).name == "bf16"


@pytest.mark.parametrize(("asked", "times"), [("bf16", "8.0"), ("fp16", "50.0")])
def test_what_is_slower_is_told_with_the_measured_ratio(
    machine: dict[torch.dtype, float], asked: str, times: str
) -> None:
    chosen = choose_precision(asked, CPU)
    assert chosen.name == asked and not chosen.note
    assert f'"{asked}" takes {times} times as long as "fp32"' in chosen.warning


def test_what_is_not_slower_is_not_talked_about(machine: dict[torch.dtype, float]) -> None:
    machine[torch.bfloat16] = 0.5
    for asked in ("bf16", "fp32", "fp64"):
        assert choose_precision(asked, CPU) == Precision(asked)


@pytest.mark.parametrize(("capable", "name"), [(True, "bf16"), (False, "fp32")])
def test_auto_on_a_gpu_is_bf16_where_it_has_it(
    monkeypatch: pytest.MonkeyPatch, capable: bool, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capable)
    gpu = torch.device("cuda", 0)
    assert choose_precision("auto", gpu) == Precision(name)
    assert choose_precision("fp16", gpu) == Precision("fp16")


def test_the_product_is_really_timed_and_short() -> None:
    started = time.perf_counter()
    assert 0 < precision.product_seconds(torch.float32) <= time.perf_counter() - started
