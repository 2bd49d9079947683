"""The precision that "auto" stands for, and the warning about a slow one."""

from pathlib import Path

import pytest
import torch

from megalite.train.step import precision
from megalite.train.step.precision import Precision, choose_precision, set_tf32

CPU = torch.device("cpu")


def processor(monkeypatch: pytest.MonkeyPatch, *instructions: str) -> None:
    """Let torch find a processor with these instructions."""
    found = {"architecture": "x86_64", **dict.fromkeys(instructions, True)}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ((), Precision("fp32")),
        (("avx2", "avx512_f", "amx_tile", "avx512_fp16"), Precision("fp32")),
        (
            ("avx512_bf16",),
            Precision("bf16", 'training.precision: "auto" is "bf16": the processor has avx512_bf16'),
        ),
        (
            ("avx512_bf16", "amx_bf16"),
            Precision("bf16", 'training.precision: "auto" is "bf16": the processor has amx_bf16'),
        ),
    ],
)
def test_auto_goes_by_the_processor_s_instructions(
    monkeypatch: pytest.MonkeyPatch, instructions: tuple[str, ...], expected: Precision
) -> None:
    processor(monkeypatch, *instructions)
    # No load on the machine may turn it: nothing is computed.
    monkeypatch.setattr(torch, "mm", lambda *_: pytest.fail("a stopwatch decides"))
    assert choose_precision("auto", CPU) == expected


def test_this_processor_s_instructions_are_read() -> None:
    """torch and the kernel see the same ones."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        pytest.skip("no /proc/cpuinfo")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    capable = "amx_bf16" in flags or "avx512_bf16" in flags
    assert choose_precision("auto", CPU).name == ("bf16" if capable else "fp32")


def test_a_resumed_run_keeps_its_precision_under_auto_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, "amx_bf16")
    kept = choose_precision("auto", CPU, "fp32")
    assert kept.name == "fp32" and "as the run began" in kept.note
    assert choose_precision("bf16", CPU, "fp32") == Precision("bf16")
    # A checkpoint of another tool says nothing of it.
    assert choose_precision("auto", CPU, None).name == "bf16"


@pytest.mark.parametrize(
    ("asked", "needed"), [("bf16", "amx_bf16 or avx512_bf16"), ("fp16", "amx_fp16 or avx512_fp16")]
)
def test_a_slow_choice_is_kept_and_warned_about(
    monkeypatch: pytest.MonkeyPatch, asked: str, needed: str
) -> None:
    processor(monkeypatch, "avx512_f")
    chosen = choose_precision(asked, CPU)
    assert chosen.name == asked and not chosen.note
    assert f'"{asked}" is slower than "fp32" on a processor without {needed}; "fp32" or' in chosen.warning


def test_a_fast_choice_is_not_talked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, "avx512_bf16", "avx512_fp16")
    for asked in ("bf16", "fp16", "fp32", "fp64"):
        assert choose_precision(asked, CPU) == Precision(asked)


@pytest.mark.parametrize(("capable", "name"), [(True, "bf16"), (False, "fp32")])
def test_auto_on_a_gpu_is_bf16_where_it_has_it(
    monkeypatch: pytest.MonkeyPatch, capable: bool, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capable)
    gpu = torch.device("cuda", 0)
    assert choose_precision("auto", gpu) == Precision(name)
    assert choose_precision("fp16", gpu) == Precision("fp16")


def test_tf32_is_set_for_cuda_alone_and_taken_back_by_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    products, elsewhere = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = products.allow_tf32, elsewhere.fp32_precision
    monkeypatch.setattr(precision, "tf32_let_on", set())
    cuda = torch.device("cuda", 0)
    try:
        for users in (True, False):
            products.allow_tf32 = users
            set_tf32(cuda, False)
            assert products.allow_tf32 == users  # nothing was asked for: as the user or the image has it
        for tf32, name in ((True, "tf32"), (False, "ieee"), (True, "tf32")):
            set_tf32(cuda, tf32)
            assert products.fp32_precision == name and products.allow_tf32 == tf32
            # Inductor reads this one; it raises where one of the two switches was set alone.
            assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
            set_tf32(CPU, not tf32)
            assert (products.fp32_precision, elsewhere.fp32_precision) == (name, before[1])
    finally:
        products.allow_tf32 = before[0]
