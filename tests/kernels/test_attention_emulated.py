"""The CUDA kernels of attention without a GPU: their own source, run on emulated threads, against float64.

The emulator (tests/kernels/emulator) runs ldmatrix and mma.sync lane by lane; asynchronous copies complete as early or
as late as allowed. Tests the algorithm and its data movement, not the compiled code.
"""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.ops.counter import MASK_LEVELS, keep_probabilities, philox
from megalite.ops.packed_attention import BlockPositions
from tests.support import emulator
from tests.support.attention import Packed, attention, counted_mask, gradients, starts
from tests.support.parity import FLOAT32_RTOL, assert_close, assert_no_worse
from tests.support.selection import cases
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="no C++ compiler")

SIXTEEN_BITS = [torch.bfloat16, torch.float16]
# Blocks have 128 queries and 64 keys, in the backward 128 keys and 64 queries, for heads of 256 half of each; every
# case crosses block boundaries.
CASES = {
    "documents": Packed((150, 1, 0, 70), (150, 1, 0, 70)),
    "unmasked": Packed((70, 40), (130, 7), right=-1),
    "a cache": Packed((10, 130), (200, 133), heads=2, kv_heads=2),
    "rows that see nothing": Packed((200,), (70,), heads=1),
    "window": Packed((200,), (330,), left=60),
    "band": Packed((150,), (130,), left=20, right=15, heads=1),
    "no keys": Packed((5,), (0,), heads=1),
    "wide heads": Packed((140, 3), (140, 3), head_size=128),
    "wide heads in a window": Packed((130,), (140,), left=40, head_size=128, heads=1),
    "heads of 96": Packed((150, 1, 70), (150, 1, 70), head_size=96),
    "heads of 96 in a window": Packed((140,), (150,), left=40, head_size=96, heads=1),
    "heads of 256": Packed((80, 1, 35), (80, 1, 35), head_size=256),
    "dropped, heads of 96": Packed((135,), (140,), left=90, head_size=96, heads=1, mask=counted_mask(1, 1)),
    "dropped, heads of 256": Packed((70,), (75,), head_size=256, heads=1, mask=counted_mask(1, 1)),
    "dropped, documents": Packed((149, 1, 0, 70), (149, 1, 0, 70), mask=counted_mask(2, 2)),
    "dropped, wide heads": Packed((135,), (140,), left=90, head_size=128, heads=1, mask=counted_mask(1, 1)),
    # Blocks of longer sequences, two rows of 140 queries and of 80 keys.
    "a block": Packed((140, 140), (80, 80), left=90, heads=1, positions=BlockPositions(2, 60, 20)),
    "dropped, a block of documents": Packed(
        (0, 130, 0, 10, 20, 120), (60, 20, 0, 0, 80, 0), positions=BlockPositions(2, 160, 80),
        mask=counted_mask(2, 2),
    ),
}  # fmt: skip


def _poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def _forward(
    packed: Packed, inputs: list[Tensor], **how: bool | int
) -> tuple[Tensor, Tensor, emulator.Report]:
    ends = starts(packed.queries), starts(packed.keys)
    output = _poisoned(*inputs[0].shape, dtype=inputs[0].dtype)
    lse = _poisoned(packed.heads, len(output), dtype=torch.float32)
    told = emulator.problem(packed, *inputs, ends)
    told.output, told.lse = output.data_ptr(), lse.data_ptr()
    return output, lse, emulator.run(told, [*inputs, output, lse], backward=False, **how)


def _backward(
    packed: Packed, inputs: list[Tensor], results: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor],
    *, in_order: bool, **how: bool | int,
) -> tuple[list[Tensor], emulator.Report]:  # fmt: skip
    ends = starts(packed.queries), starts(packed.keys)
    found = [_poisoned(*each.shape, dtype=each.dtype) for each in inputs]
    rows = 2 if packed.mask is None else 4
    statistics = _poisoned(rows, packed.heads, len(inputs[0]), dtype=torch.float32)
    sums = torch.zeros(inputs[0].shape)
    told = emulator.problem(packed, *inputs, ends)
    told.output, told.lse = (each.data_ptr() for each in results)
    told.output_grad, told.lse_grad = (each.data_ptr() for each in grads)
    told.query_grad, told.key_grad, told.value_grad = (each.data_ptr() for each in found)
    told.statistics = statistics.data_ptr()
    told.query_sums = None if in_order else sums.data_ptr()
    report = emulator.run(told, [*inputs, *results, *grads, *found, statistics, sums], backward=True, **how)
    if not in_order:  # the last kernel rounds the sums; the emulator does not run it
        found[0] = (sums * packed.scale).to(found[0].dtype)
    return found, report


@pytest.mark.extended
def test_the_counter_is_the_one_of_python_bit_for_bit() -> None:
    drawn = torch.Generator().manual_seed(4)

    def word(below: int) -> int:
        return int(torch.randint(below, (), generator=drawn))

    for _ in range(50):
        position, head, sample = word(2**31), word(2**20), word(2**62)
        key, dropped, first = (word(2**32), word(2**32)), word(MASK_LEVELS - 1) + 1, word(2**31)
        row, kept = (ctypes.c_uint32 * 2)(), (ctypes.c_uint8 * 100)()
        emulator.library().draw(
            position, head, ctypes.c_int64(sample), *key, ctypes.c_int64(dropped), 100, first, row, kept
        )
        counter = tuple(torch.tensor([each]) for each in (position, head, sample & 0xFFFFFFFF, sample >> 32))
        assert list(row) == [int(each) for each in philox(counter, key)[:2]]
        places = range(position, position + 1), range(first, first + 100)
        expected = keep_probabilities(
            key, torch.tensor([sample]), range(head, head + 1), *places, dropped=dropped
        )
        assert list(kept) == expected.flatten().tolist()


def test_bands_are_those_of_a_naive_mask() -> None:
    wrong = (ctypes.c_int * 5)()
    limit = 8
    compared = emulator.library().compare_bands(limit, wrong)
    expected = 5 * (limit + 1) ** 2 * (limit + 2) ** 2
    assert compared == expected, f"queries, keys, left, right, shift: {list(wrong)}"


@pytest.mark.parametrize("case", CASES)
def test_forward(case) -> None:
    packed = CASES[case]
    dtype, late = SIXTEEN_BITS[len(case) % 2], len(case) % 4 < 2
    inputs = packed.inputs(dtype)
    output, lse, report = _forward(packed, inputs, late=late)
    assert report.problem is None, report.problem.decode()
    assert report.conflicts == 0
    exact, exact_lse = attention(packed, *(each.double() for each in inputs))
    assert_no_worse(output, attention(packed, *inputs)[0], exact, what="output")
    nothing = exact_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), nothing)
    assert_close(lse[~nothing], exact_lse[~nothing], rtol=FLOAT32_RTOL, what="log-sum-exps")


@pytest.mark.parametrize(
    ("case", "in_order", "late"),
    cases(
        [
            ("documents", False, True),
            ("documents", True, False),
            ("unmasked", True, True),
            ("a cache", False, False),
            ("rows that see nothing", True, True),
            ("window", True, False),
            ("window", False, True),
            ("band", False, False),
            ("no keys", True, True),
            ("wide heads", True, True),
            ("wide heads in a window", False, False),
            ("heads of 96", True, True),
            ("heads of 96 in a window", False, False),
            ("heads of 256", True, False),
            ("dropped, heads of 96", True, False),
            ("dropped, heads of 256", True, True),
            ("dropped, documents", True, False),
            ("dropped, wide heads", True, True),
            ("a block", True, False),
            ("a block", False, True),
            ("dropped, a block of documents", True, True),
        ],
        core=[
            ("documents", False, True),
            ("window", True, False),
            ("dropped, a block of documents", True, True),
        ],
    ),
)
def test_backward(case, in_order, late) -> None:
    _check_backward(case, in_order=in_order, late=late)


@pytest.mark.parametrize(
    ("case", "late"),
    [
        ("heads of 96", False),
        ("wide heads", True),
        ("heads of 256", False),
        ("dropped, heads of 96", True),
        ("dropped, wide heads", False),
        ("dropped, heads of 256", True),
    ],
)
@pytest.mark.extended
def test_backward_where_a_block_has_99_kib_of_shared_memory(case, late) -> None:
    _check_backward(case, in_order=True, late=late, shared=99 * 1024)


def _check_backward(case: str, *, in_order: bool, **how: bool | int) -> None:
    packed, dtype = CASES[case], SIXTEEN_BITS[len(case) % 2]
    inputs = packed.inputs(dtype)
    wide = [each.double() for each in inputs]
    output, lse = (each.detach() for each in attention(packed, *wide))
    results = output.to(dtype), lse.float()
    grads = packed.output_grads(dtype, results[1])
    found, report = _backward(packed, inputs, results, grads, in_order=in_order, **how)
    assert report.problem is None, report.problem.decode()
    assert report.conflicts == 0
    plain, exact = gradients(packed, inputs, *grads), gradients(packed, wide, *grads)
    for name, ours, naive, reference in zip(("query", "key", "value"), found, plain, exact, strict=True):
        assert_no_worse(ours, naive, reference, what=f"gradient of the {name}")


# The numbers of the barriers of a small block over three others, one of each kind. The last one of `keys` is before the
# gradients overwrite the key tile.
BARRIERS = {"forward": (0, 1, 2), "dropping": (0,), "queries": (0, 1), "keys": (1, 2, 6)}


@pytest.fixture(scope="module")
def race() -> Path:
    """Return the program that runs the kernels on system threads under ThreadSanitizer."""
    return emulator.compiled("race.cpp", "-O1", "-g1", "-fsanitize=thread")


def _races(race: Path, kernel: str, *, late: bool, left_out: int = -1) -> bool:
    environ = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66 symbolize=0"}
    command = [str(race), kernel, str(int(late)), str(left_out)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode in (0, 66), done.stdout + done.stderr
    return done.returncode == 66


@pytest.mark.parametrize("kernel", cases(BARRIERS, core=["keys"]))
def test_no_two_threads_race(race, kernel) -> None:
    assert not any(_races(race, kernel, late=late) for late in (False, True))


@pytest.mark.parametrize("kernel", cases(BARRIERS, core=["keys"]))
def test_a_deleted_barrier_is_a_race(race, kernel) -> None:
    # ThreadSanitizer remembers the last accesses alone: on a busy machine a run can miss a race that is there.
    tries = [late for _ in range(10) for late in (True, False)]
    harmless = [
        n for n in BARRIERS[kernel] if not any(_races(race, kernel, late=late, left_out=n) for late in tries)
    ]
    assert not harmless


def test_a_deleted_barrier_gives_wrong_results() -> None:
    """Without a barrier, a block of queries over two blocks of keys reads shared memory that is still NaN."""
    packed = Packed((128,), (128,), heads=1, kv_heads=1, right=-1)
    inputs = packed.inputs(torch.bfloat16)
    right = _forward(packed, inputs, late=True)[0]
    for barrier in range(4):
        runs = [_forward(packed, inputs, late=late, left_out_sync=barrier)[0] for late in (False, True)]
        assert not all(torch.equal(each, right) for each in runs), barrier


@pytest.mark.parametrize("in_order", [False, True])
def test_documents_know_nothing_of_each_other(in_order) -> None:
    """Setting another document to NaN changes no bit of this one, although this one's last tile covers its rows."""
    packed = Packed((30, 70, 5), (30, 70, 5), heads=1, right=-1)
    inputs = packed.inputs(torch.bfloat16)
    leaked = [each.detach().clone() for each in inputs]
    for each in leaked:
        each[30:100] = float("nan")
    runs = []
    for given in (inputs, leaked):
        output, lse, _ = _forward(packed, given, late=True)
        grads = packed.output_grads(torch.bfloat16, torch.zeros_like(lse))
        found, _ = _backward(packed, given, (output, lse), grads, in_order=in_order, late=True)
        runs.append([output, lse.T, *found])
    for own in (slice(0, 30), slice(100, 105)):
        assert all(torch.equal(one[own], other[own]) for one, other in zip(*runs, strict=True))
