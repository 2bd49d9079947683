"""The PTX interpreter itself: faults planted in a kernel's PTX are found, and only known forms are executed."""

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.parity import BF16_RTOL, FLOAT32_RTOL, relative_error
from tests.support.ptx import arithmetic, parse
from tests.support.ptx.build import WHY_NOT, compiled
from tests.support.ptx.device import Device, unknown_forms
from tests.support.ptx.instructions import known
from tests.support.ptx.machine import Launch, Machine
from tests.support.ptx.memory import Fault, Global
from tests.support.selection import cases

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
Break = Callable[[str], str]


def substituted(pattern: str, by: str, count: int = 0) -> Break:
    def broken(text: str) -> str:
        made, found = re.subn(pattern, by, text, count=count)
        assert found, f"the PTX has no {pattern}"
        return made

    return broken


def norm(
    device: Device, columns: int = 1032, dtype: torch.dtype = torch.bfloat16, spare: int = 0
) -> list[Tensor]:
    """Compute a LayerNorm of x + residual: torch's sum (in its dtype) and output (float64), then the kernel's results.

    The kernel's are sum, output, mean and inverse. spare: the number of columns that the output lacks.
    """
    rows, generator = 3, torch.Generator().manual_seed(5)
    x, residual, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, columns),) * 2 + ((columns,),) * 2
    )
    total, output = (
        torch.full_like(x, torch.nan),
        torch.full((rows * columns - spare,), torch.nan, dtype=dtype),
    )
    mean, inverse = torch.full((rows,), torch.nan), torch.full((rows,), torch.nan)
    results = [total, output, mean, inverse]
    inputs = (x, residual, weight, bias)
    assert device.call("megalite_norm_forward_cuda", *inputs, *results, rows, columns, 1e-5, dtype) == 0
    expected = x + residual
    return [
        expected,
        F.layer_norm(expected.double(), (columns,), weight.double(), bias.double(), 1e-5),
        *results,
    ]


def right(made: list[Tensor]) -> bool:
    expected, normalised, total, output, mean, inverse = made
    wide = expected.double()
    scale = (wide.var(dim=1, correction=0) + 1e-5).rsqrt()
    return (
        torch.equal(total, expected)
        and relative_error(output, normalised.flatten()) <= BF16_RTOL
        and relative_error(mean, wide.mean(dim=1)) <= FLOAT32_RTOL
        and relative_error(inverse, scale) <= FLOAT32_RTOL
    )


def test_an_unbroken_norm_is_right_in_any_order_of_warps() -> None:
    first = norm(Device("norms"))
    assert right(first)
    for order in (range(32), range(31, -1, -1)):
        assert all(map(torch.equal, norm(Device("norms", order=order)), first))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (substituted(r"bar\.sync\s+0;", ""), "with no barrier between"),
        (substituted(r"st\.shared\.f32[^;]*;", ""), "reads shared memory that nobody wrote"),
        (substituted(r"(st\.global\.v4\.u32\s+\[%rd\d+)\]", r"\1+8]"), "no multiple of 16"),
        (substituted(r"(ld\.global\.v4\.u32[^;]*\[%rd\d+)\]", r"\1+1048576]"), "outside of every allocation"),
        (
            substituted(r"(shfl\.sync\.bfly\.b32[^;]*, )%r\d+;", r"\g<1>65535;"),
            "does not name|without the lane",
        ),
        (substituted(r"sqrt\.rn\.f32[^;]*;", "trap;"), "traps"),
    ],
    ids=["barrier", "store to shared memory", "alignment", "bounds", "mask", "trap"],
)
def test_a_fault_is_told(broken: Break, said: str) -> None:
    with pytest.raises(Fault, match=said):
        norm(Device("norms", broken=broken))


def test_a_block_larger_than_a_kernel_was_compiled_for_is_refused() -> None:
    """Like a GPU, which lacks registers for more threads than __launch_bounds__ allows."""
    with pytest.raises(AssertionError, match="assert 1 == 0"):
        norm(Device("norms", broken=substituted(r"\.maxntid 1024", ".maxntid 64")))


@pytest.mark.parametrize(
    "broken",
    [
        # Truncated instead of rounded: the upper half of the bits.
        substituted(r"cvt\.rn\.bf16\.f32\s+(%rs\d+), (%f\d+);", r"mov.b32 {_, \1}, \2;"),
        substituted(r"st\.global\.v4\.u32[^;]*;", ""),
        substituted(r"shfl\.sync\.bfly", "shfl.sync.down"),
        substituted(r"sub\.f32\s+(%f\d+), (%f\d+), (%f\d+);", r"sub.f32 \1, \3, \2;"),
        substituted(r"rcp\.rn\.f32\s+(%f\d+), (%f\d+);", r"mov.f32 \1, \2;"),
    ],
    ids=["rounding", "dropped stores", "shuffle", "operands", "reciprocal"],
)
def test_a_wrong_instruction_makes_wrong_results(broken: Break) -> None:
    assert not right(norm(Device("norms", broken=broken)))


def test_a_missing_barrier_is_seen_in_the_results_too() -> None:
    """Return the results without race detection, in the warp order that hides a missing barrier least."""
    text = substituted(r"bar\.sync\s+0;", "")
    results = [
        norm(Device("norms", order=order, broken=text, unwritten=0xFF, watched=False))
        for order in (range(32), range(31, -1, -1))
    ]
    assert not all(map(right, results))


def test_an_output_that_is_too_short_is_seen() -> None:
    with pytest.raises(Fault, match="outside of every allocation"):
        norm(Device("norms"), spare=1)


@pytest.mark.parametrize(
    ("broken", "form"),
    [
        (substituted(r"add\.f32", "add.ftz.f32"), "add.ftz.f32"),
        (substituted(r"cvt\.rn\.bf16\.f32", "cvt.rz.bf16.f32"), "cvt.rz.bf16.f32"),
        (substituted(r"ld\.global\.v4\.u32", "ld.volatile.global.v4.u32"), "ld.volatile.global.v4.u32"),
    ],
)
def test_a_modifier_that_is_not_known_is_refused(broken: Break, form: str) -> None:
    with pytest.raises(parse.PtxError, match=re.escape(form)):
        norm(Device("norms", broken=broken))


# The forms of the Hopper forward that the interpreter does not know: mbarrier, TMA and wgmma. Other kernels have none.
HOPPER = {
    "bar.arrive", "bar.sync", "cvta.param.u64", "fence.mbarrier_init.release.cluster", "fence.proxy.async.shared::cta",
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes",
    "mbarrier.arrive.expect_tx.shared::cta.b64", "mbarrier.arrive.shared::cta.b64", "mbarrier.init.shared::cta.b64",
    "mbarrier.try_wait.parity.shared::cta.b64", "nanosleep.u32", "prefetch.tensormap",
    "setmaxnreg.dec.sync.aligned.u32", "setmaxnreg.inc.sync.aligned.u32", "wgmma.commit_group.sync.aligned",
    "wgmma.fence.sync.aligned", "wgmma.wait_group.sync.aligned",
    *(f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}" for n in (64, 128) for kind in ("bf16", "f16")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arch", "unknown"),
    cases([
        ("norms", 80, set()), ("activations", 80, set()), ("cross_entropy", 80, set()), ("adamw", 80, set()),
        ("rotary", 80, set()), ("attention_forward_64", 80, set()), ("attention_backward_64", 80, set()),
        ("attention_hopper_64", "90a", HOPPER),
    ], core=lambda case: case[0] == "norms"),
)  # fmt: skip
def test_which_forms_are_not_interpreted(name: str, arch: int | str, unknown: set[str]) -> None:
    module = parse.parse(compiled(name, arch)[0])
    assert module.kernels
    assert set().union(*(unknown_forms(module.kernel(each)) for each in module.kernels)) == unknown


# Kernels of a few lines with one parameter: the address of their output.
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 k_param_0)\n{\n"
REGISTERS = ".reg .pred %p<9>;\n.reg .b16 %rs<9>;\n.reg .b32 %r<9>;\n.reg .f32 %f<9>;\n.reg .b64 %rd<9>;\n"
PLACE = "mov.u32 %r1, %tid.x;\nld.param.u64 %rd1, [k_param_0];\nmul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd3, %rd1, %rd2;\n"


def run(body: str, threads: int = 32, order: Sequence[int] | None = None) -> Tensor:
    """Run a kernel's body and return what the threads wrote, int32."""
    kernel = parse.parse(f"{HEAD}{REGISTERS}{PLACE}{body}\nret;\n}}\n").kernel("k")
    assert not unknown_forms(kernel), unknown_forms(kernel)
    made = torch.full((threads,), -1, dtype=torch.int32)
    begin, size = made.data_ptr(), made.nbytes
    launch = Launch((1, 1, 1), (threads, 1, 1), 0, begin.to_bytes(16, "little"), order)
    Machine(kernel, launch, range(1), Global([(begin, size)])).run()
    return made


def test_lanes_that_part_come_together_again() -> None:
    made = run(
        "mov.u32 %r2, 0;\nmov.u32 %r5, 0;\n$L:\nadd.s32 %r2, %r2, %r1;\nadd.s32 %r5, %r5, 1;\n"
        "setp.lt.u32 %p1, %r5, %r1;\n@%p1 bra $L;\n"
        "shfl.sync.bfly.b32 %r3|%p2, %r2, 1, 31, -1;\nst.global.u32 [%rd3], %r3;"
    )
    lanes = torch.arange(32)
    assert torch.equal(made.long(), (lanes * lanes.clamp(min=1))[lanes ^ 1])


LEAVE = "setp.gt.u32 %p1, %r1, 15;\n@%p1 ret;\n"


def test_a_shuffle_after_lanes_left_is_refused_where_its_mask_names_them() -> None:
    with pytest.raises(Fault, match="names a lane that has exited"):
        run(LEAVE + "shfl.sync.bfly.b32 %r3|%p2, %r1, 1, 31, -1;\nst.global.u32 [%rd3], %r3;")
    made = run(LEAVE + "shfl.sync.bfly.b32 %r3|%p2, %r1, 1, 31, 65535;\nst.global.u32 [%rd3], %r3;")
    assert made.tolist() == [lane ^ 1 for lane in range(16)] + [-1] * 16


def test_a_shuffle_that_some_lanes_never_reach_is_refused() -> None:
    stuck = "setp.gt.u32 %p1, %r1, 15;\n@%p1 bra $W;\nshfl.sync.bfly.b32 %r3|%p2, %r1, 1, 31, -1;\n$W:\nbar.sync 0;"
    with pytest.raises(Fault, match="never come"):
        run(stuck)


def test_a_barrier_that_part_of_a_block_reaches_lets_go_when_the_others_exit() -> None:
    made = run(LEAVE + "bar.sync 0;\nst.global.u32 [%rd3], %r1;", threads=64)
    assert made.tolist() == [*range(16), *[-1] * 48]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("st.global.u32 [%rd1], %r1;", "writes where another thread writes at once"),
        ("st.global.u32 [%rd3], %r1;\nld.global.u32 %r2, [%rd1];", "reads what another thread wrote"),
        ("ld.global.u32 %r2, [%rd1];\nst.global.u32 [%rd3], %r1;", "writes what another thread read"),
        ("st.global.u32 [%rd3], %r1;\nld.global.nc.u32 %r2, [%rd3];", "past the caches"),
        ("mov.u32 %r2, 0;\ndiv.u32 %r3, %r1, %r2;", "divides by zero"),
        ("$L:\nbra $L;", "does not end"),
        ("shfl.sync.bfly.b32 %r3|%p2, %r1, 1, 31, 1;", "without the lane itself"),
    ],
    ids=["one place", "read after write", "write after read", "read-only", "zero", "loop", "mask"],
)
def test_what_is_undefined_is_told(body: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.ptx.machine._MOST_STEPS", 1000)
    with pytest.raises(Fault, match=said):
        run(body)


def test_a_warps_sync_orders_its_own_accesses_alone() -> None:
    body = "{}\nst.global.u32 [%rd3], %r1;\n{}\nld.global.u32 %r2, [%rd1];\nst.global.u32 [%rd3], %r2;"
    with pytest.raises(Fault, match="with no barrier between"):
        run(body.format("", "bar.warp.sync -1;"), threads=64, order=(1, 0))
    with pytest.raises(Fault, match="writes what another thread read"):
        run(body.format("", "bar.sync 0;"), threads=64)


# The interpreter's arithmetic, against Python's exact integers and against float64.


def test_sums_of_products_are_rounded_once() -> None:
    generator = np.random.default_rng(3)
    a, b = generator.standard_normal((2, 20000)).astype(np.float32)
    c = (-a * b * (1 + generator.integers(-2, 3, 20000) * 2.0**-24)).astype(np.float32)
    exact = np.longdouble(a) * np.longdouble(b) + np.longdouble(c)  # has the bits for it: it cancels
    assert np.array_equal(arithmetic.FORMS["fma.rn.f32"].compute(a, b, c), exact.astype(np.float32))
    down = arithmetic.FORMS["fma.rm.f32"].compute(a, b, c)
    assert (down <= exact).all() and (np.nextafter(down, np.float32(np.inf)) > exact).all()


def test_conversions_round_as_torch_does() -> None:
    bits = np.random.default_rng(4).integers(0, 2**32, 100_000, dtype=np.uint32)
    values = np.concatenate(
        [bits.view(np.float32), np.array([0.0, -0.0, np.inf, 65519.0, 65520.0], np.float32)]
    )
    values = values[~np.isnan(values)]
    for form, dtype in (("cvt.rn.bf16.f32", torch.bfloat16), ("cvt.rn.f16.f32", torch.float16)):
        with np.errstate(over="ignore"):
            made = torch.from_numpy(arithmetic.FORMS[form].compute(values).view(np.int16))
        assert torch.equal(made, torch.from_numpy(values).to(dtype).view(torch.int16))
    nan = np.array([np.nan], np.float32)
    assert arithmetic.FORMS["cvt.rn.bf16x2.f32"].compute(nan, np.float32([1.0])).tolist() == [0x7FFF3F80]
    assert arithmetic.FORMS["cvt.sat.f32.f32"].compute(np.float32([np.nan, -1, 0.5, 2])).tolist() == [
        0,
        0,
        0.5,
        1,
    ]


def test_whole_numbers_wrap_and_shifts_end() -> None:
    forms = {name: each.compute for name, each in arithmetic.FORMS.items()}
    word = np.array([0x80000000, 0xFFFFFFFF, 5], np.uint32)
    by = np.array([31, 32, 200], np.uint32)
    assert forms["shl.b32"](word, by).tolist() == [0, 0, 0]
    assert forms["shr.u32"](word, by).tolist() == [1, 0, 0]
    assert forms["shr.s32"](word.view(np.int32), by).tolist() == [-1, -1, 0]
    signed = np.array([-7, 7, -(2**31)], np.int32)
    three = np.array([2, -2, 3], np.int32)
    assert forms["div.s32"](signed, three).tolist() == [-3, -3, -715827882]
    assert forms["rem.s32"](signed, three).tolist() == [-1, 1, -2]
    assert forms["mul.wide.s32"](signed, three).tolist() == [-14, -14, -3 * 2**31]
    assert forms["bfi.b32"](word, ~word, np.uint32([4]), np.uint32([8])).tolist() == [
        (~int(each) & 0xFFFFFFFF & ~0xFF0) | ((int(each) & 0xFF) << 4) for each in word
    ]


def test_a_register_of_another_width_is_refused() -> None:
    with pytest.raises(parse.PtxError, match="not as wide"):
        run("add.s64 %rd4, %rd1, %r1;")


def test_only_barrier_0_of_the_whole_block_is_known() -> None:
    for text, expected in (("bar.sync 0;", True), ("bar.sync 1;", False), ("bar.sync 0, 64;", False)):
        kernel = parse.parse(f"{HEAD}{REGISTERS}{text}\nret;\n}}\n").kernel("k")
        assert known(kernel.code[0]) == expected
