"""The attention kernels of mma.sync as nvcc compiles them: their PTX, launched by their own host code, against float64.

Runs the inline assembly of cuda/device_machine.cuh: ldmatrix, mma.sync, cp.async, packed conversions, reductions in
memory. The Hopper forward (wgmma, TMA, mbarriers) is not interpreted; test_ptx_interpreter.py lists these forms.
"""

import ctypes
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import emulator
from tests.support.attention import Packed, attention, counted_mask, gradients, starts
from tests.support.parity import FLOAT32_RTOL, assert_close, assert_no_worse
from tests.support.ptx.build import WHY_NOT
from tests.support.ptx.device import Device
from tests.support.ptx.memory import Fault
from tests.support.selection import cases

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
DROPPING = Packed((30,), (30,), heads=1, mask=counted_mask(1, 1))
# Blocks have 128 queries and 64 keys, in the backward 128 keys and 64 queries.
CASES: dict[str, Packed] = {
    "documents": Packed((20, 1, 0, 9), (20, 1, 0, 9)),
    "window over two blocks": Packed((140,), (150,), left=60, heads=1),
    "wide heads": Packed((30,), (70,), heads=1, head_size=128),
    "dropped": DROPPING,
}


def _poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def _call(name: str, packed: Packed, told: emulator.Problem, tensors: list[Tensor], **how: Any) -> Device:
    mask = packed.mask
    drops = "" if mask is None else "_dropout"
    device = Device(f"attention_{name}_{packed.head_size}{drops}", **how)
    touched = tensors if mask is None else [*tensors, mask.sample_indices]
    function = f"megalite_{device.name}_cuda"
    assert device.call(function, ctypes.byref(told), tensors[0].dtype, touched=touched) == 0
    return device


def forward(packed: Packed, inputs: list[Tensor], **how: Any) -> tuple[Tensor, Tensor]:
    ends = starts(packed.queries), starts(packed.keys)
    output = _poisoned(*inputs[0].shape, dtype=inputs[0].dtype)
    lse = _poisoned(packed.heads, len(output), dtype=torch.float32)
    told = emulator.problem(packed, *inputs, ends)
    told.output, told.lse = output.data_ptr(), lse.data_ptr()
    _call("forward", packed, told, [*inputs, output, lse, *ends], **how)
    return output, lse


def backward(
    packed: Packed, inputs: list[Tensor], results: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor],
    *, in_order: bool, **how: Any,
) -> tuple[list[Tensor], Device]:  # fmt: skip
    ends = starts(packed.queries), starts(packed.keys)
    found = [_poisoned(*each.shape, dtype=each.dtype) for each in inputs]
    statistics = _poisoned(2 if packed.mask is None else 4, packed.heads, len(inputs[0]), dtype=torch.float32)
    sums = _poisoned(*inputs[0].shape, dtype=torch.float32)
    told = emulator.problem(packed, *inputs, ends)
    told.output, told.lse = (each.data_ptr() for each in results)
    told.output_grad, told.lse_grad = (each.data_ptr() for each in grads)
    told.query_grad, told.key_grad, told.value_grad = (each.data_ptr() for each in found)
    told.statistics = statistics.data_ptr()
    told.query_sums = None if in_order else sums.data_ptr()
    tensors = [*inputs, *results, *grads, *found, statistics, sums, *ends]
    return found, _call("backward", packed, told, tensors, **how)


def _unwritten(packed: Packed) -> dict[str, int]:
    """With dropout, rows past a sequence's end read unwritten words; their results are not stored."""
    return {} if packed.mask is None else {"unwritten": 0xFF}


@pytest.mark.parametrize("late", cases([True, False], core=[True]), ids=["late", "early"])
@pytest.mark.parametrize("case", cases(CASES, core=["documents"]))
def test_forward(case: str, late: bool) -> None:
    packed, dtype = CASES[case], torch.bfloat16 if late else torch.float16
    inputs = [each.detach() for each in packed.inputs(dtype)]
    output, lse = forward(packed, inputs, late_copies=late, **_unwritten(packed))
    exact, exact_lse = attention(packed, *(each.double() for each in inputs))
    assert_no_worse(output, attention(packed, *inputs)[0], exact, what="output")
    assert_close(lse, exact_lse, rtol=FLOAT32_RTOL, what="log-sum-exps")


@pytest.mark.parametrize(
    ("case", "in_order", "arch"),
    cases([
        ("documents", True, 80), ("documents", False, 80), ("window over two blocks", False, 90),
        ("wide heads", True, 90), ("dropped", True, 80),
    ], core=[("documents", False, 80)]),
)  # fmt: skip
def test_backward(case: str, in_order: bool, arch: int) -> None:
    packed, dtype = CASES[case], torch.float16 if in_order else torch.bfloat16
    inputs = [each.detach() for each in packed.inputs(dtype)]
    output, lse = (each.detach() for each in attention(packed, *(each.double() for each in inputs)))
    results = output.to(dtype), lse.float()
    grads = packed.output_grads(dtype, results[1])
    how = {"arch": arch, "capability": arch, "late_copies": in_order, **_unwritten(packed)}
    found, device = backward(packed, inputs, results, grads, in_order=in_order, **how)
    exact = gradients(packed, [each.double() for each in inputs], *(each.double() for each in grads))
    plain = gradients(packed, inputs, *grads)
    for name, *each in zip(("query", "key", "value"), found, plain, exact, strict=True):
        assert_no_worse(*each, what=f"gradient of {name}")
    adds = "red.global.add.v2.f32" if arch == 90 else "atom.global.add.f32"
    ran = {each.form for name, _ in device.launched for each in device.kernel(name).code}
    assert in_order or adds in ran


@pytest.mark.extended
def test_what_nobody_wrote_changes_nothing() -> None:
    inputs = [each.detach() for each in DROPPING.inputs(torch.bfloat16)]
    made = [forward(DROPPING, inputs, unwritten=byte)[0] for byte in (0, 0xFF)]
    assert torch.equal(*made)


@pytest.mark.extended
def test_a_chip_of_99_kib_computes_gradients_of_dropped_attention() -> None:
    """8.6 and 8.9 run code for 8.0, but allow only 99 KiB of shared memory per block."""
    packed = Packed((30,), (30,), heads=1, head_size=128, mask=counted_mask(1, 1))
    dtype = torch.bfloat16
    inputs = [each.detach() for each in packed.inputs(dtype)]
    output, lse = (each.detach() for each in attention(packed, *(each.double() for each in inputs)))
    results = output.to(dtype), lse.float()
    grads = packed.output_grads(dtype, results[1])
    found, _ = backward(packed, inputs, results, grads, in_order=True, capability=86, unwritten=0xFF)
    exact = gradients(packed, [each.double() for each in inputs], *(each.double() for each in grads))
    plain = gradients(packed, inputs, *grads)
    for name, *each in zip(("query", "key", "value"), found, plain, exact, strict=True):
        assert_no_worse(*each, what=f"gradient of {name}")


@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        (r"(cvt\.rn\.bf16x2\.f32 %\w+), (%\w+), (%\w+);", r"\1, \3, \2;"),
        (r"\.x4\.trans\.shared", ".x4.shared"),
        (r"(mma\.sync[^{]*\{[^}]*\}, \{%r\d+), (%r\d+), (%r\d+)", r"\1, \3, \2"),
        (r"(mma\.sync.*\{)(%r\d+), (%r\d+)(\},)", r"\1\3, \2\4"),
        (r"cp\.async\.wait_all;", ""),
        (r"bar\.sync\s+0;", ""),
        (r"(cp\.async\.cg[^;]*), 16, %r\d+;", r"\1, 16, 16;"),
        (r"st\.global\.v4\.b32[^;]*;", ""),
    ],
    ids=[
        "packing",
        "transposition",
        "left operand",
        "right operand",
        "wait",
        "barrier",
        "zeroed rows",
        "store",
    ],
)
def test_broken_assembly_is_seen(pattern: str, by: str) -> None:
    packed = CASES["documents"]
    inputs = [each.detach() for each in packed.inputs(torch.bfloat16)]

    def broken(text: str) -> str:
        made, found = re.subn(pattern, by, text)
        assert found, f"the PTX has no {pattern}"
        return made

    with pytest.raises((Fault, AssertionError)):
        output, _ = forward(packed, inputs, broken=broken)
        exact = attention(packed, *(each.double() for each in inputs))[0]
        assert_no_worse(output, attention(packed, *inputs)[0], exact, what="output")


def test_an_error_of_one_call_is_not_told_of_the_next() -> None:
    """A chip with 99 KiB of shared memory per block refuses larger tiles; the next call works again."""
    packed = Packed((30,), (30,), heads=1, head_size=128)
    inputs = [each.detach() for each in packed.inputs(torch.bfloat16)]
    ends = starts(packed.queries), starts(packed.keys)
    output, lse = torch.zeros_like(inputs[0]), torch.zeros(1, 30)
    told = emulator.problem(packed, *inputs, ends)
    told.output, told.lse = output.data_ptr(), lse.data_ptr()
    touched = [*inputs, output, lse, *ends]

    def call(told: emulator.Problem) -> int:
        function = "megalite_attention_forward_128_cuda"
        return device.call(function, ctypes.byref(told), torch.bfloat16, touched=touched)

    device = Device("attention_forward_128")
    device.most_shared = 16 * 1024
    assert call(told) == 1
    device.most_shared = None
    assert call(told) == 0
