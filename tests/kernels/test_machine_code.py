"""Machine code of every kernel, for every chip of the library: width of loads and stores, registers, shared memory.

nvcc may turn a 16-byte copy into four instructions of 4 bytes, and a kernel that compiles may exceed a chip's limits;
neither shows before a GPU runs the kernel.
"""

import itertools
import shutil
from collections.abc import Iterator

import pytest
import torch

from megalite.ops import extension
from megalite.ops.packed_attention import CUDA_HEAD_SIZES
from tests.support.machine_code import OBJECTS, Kernel, kernels

pytestmark = [
    pytest.mark.skipif(
        not any(OBJECTS.glob("*.o")),
        reason="LOUD: no objects in build/kernels/cuda: no machine code was looked at",
    ),
    pytest.mark.skipif(
        shutil.which("c++filt") is None, reason="LOUD: no c++filt to read kernels' names with"
    ),
]

KIB = 1024
MOST_SHARED = {
    "8.0": 163 * KIB,
    "8.6": 99 * KIB,
    "8.9": 99 * KIB,
    "9.0": 227 * KIB,
    "10.0": 227 * KIB,
    "12.0": 99 * KIB,
}
"""Compute capability -> opt-in limit of shared memory per block (CUDA C++ Programming Guide, "Technical Specifications
per Compute Capability")."""
UNASKED_SHARED = 48 * KIB
NORMS_SHARED = 16 * KIB
"""The largest dynamic shared memory of `norm_backward`: two float32 sums of 2048 columns."""
REGISTERS, MOST_THREADS, REGISTERS_AT_ONCE = (
    65536,
    1024,
    256,
)  # per block; a warp's are allocated in units of 256

WIDE = {
    "glu": (0, 0),
    "glu_backward": (0, 0),
    "bias_gelu": (0, 0),
    "bias_gelu_backward": (1, 0),  # a column's sum over the rows
    "expert_rows": (0, 1),  # the place of a row
    "expert_sums": (0, 6),  # places and weights of rows, of which two are in flight
    "expert_sums_backward": (1, 2),
    "turn": (0, 1),  # the token's position
    "norm_forward": (2, 0),  # mean and inverse deviation
    "norm_backward": (0, 2),
    "forward_kernel": (4, 7),  # log-sum-exps; cu_seqlens and dropout state
    "forward_hopper_kernel": (2, 4),
    "key_gradients_kernel": (0, 6),
    "query_gradients_kernel": (0, 12),  # statistics of rows
}
"""Kernel -> the number of its stores, and of its loads, that are not 16 bytes wide."""
WIDE_WITH_ENDS = {
    "cross_entropy_gradient": (1, 1),
    "cross_entropy_statistics": (0, 1),
    "accumulate": (1, 1),
    "update": (3, 3),
}
"""Kernel -> the least number of 16-byte stores, and of loads, next to scalar ones for the ends of rows."""
NARROW = {
    "sum_partials",
    "norm_sum_partials",
    "norm_forward_any",
    "norm_backward_any",
    "narrow_query_sums_kernel",
    "statistics_kernel",
    "sum_chunks",
}
"""Kernels with scalar accesses: for rows that are not aligned to 16 bytes, and small sums."""


@pytest.fixture(scope="module")
def built() -> list[Kernel]:
    """Return all kernels, without the empty bodies of the 9.0 kernel on other chips."""
    return [each for each in kernels() if each.function != "forward_hopper_kernel" or each.arch == "sm_90a"]


def _in_packs(kernels: list[Kernel]) -> Iterator[Kernel]:
    """Yield the vectorised kernels; some have scalar variants, N = 1, for unaligned rows."""
    scalar = ("activations.cu", "expert_rows.cu", "rotary.cu")
    for kernel in kernels:
        if kernel.function in WIDE and not (kernel.source in scalar and kernel.arguments[-1] == "1"):
            yield kernel


def test_every_kernel_stands_in_a_table(built: list[Kernel]) -> None:
    assert {kernel.function for kernel in built} == WIDE.keys() | WIDE_WITH_ENDS.keys() | NARROW


def test_packs_are_stored_and_loaded_whole(built: list[Kernel]) -> None:
    complaints = []
    for kernel in _in_packs(built):
        for what, widths, narrow in zip(
            ("stores", "loads"), (kernel.stores, kernel.loads), WIDE[kernel.function], strict=True
        ):
            if widths.total() - widths[16] > narrow or (what == "stores" and not widths[16]):
                complaints.append(f"{kernel.name} ({kernel.arch}): {what} of {dict(widths)} bytes")
    assert not complaints, "\n".join(complaints)


def test_the_bulk_of_ragged_rows_goes_in_packs(built: list[Kernel]) -> None:
    for kernel in built:
        if kernel.function in WIDE_WITH_ENDS:
            stores, loads = WIDE_WITH_ENDS[kernel.function]
            assert kernel.stores[16] >= stores and kernel.loads[16] >= loads, kernel.name


def test_a_block_of_every_kernel_fits_the_registers(built: list[Kernel]) -> None:
    for kernel in built:
        of_warp = -(-kernel.registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        assert kernel.threads <= MOST_THREADS, kernel.name
        assert of_warp * -(-kernel.threads // 32) <= REGISTERS, kernel.name


def test_shared_memory_without_asking_is_what_every_chip_gives(built: list[Kernel]) -> None:
    """Attention's kernels have only dynamic shared memory, within the opt-in limit; others need no opt-in."""
    for kernel in built:
        by_launch = NORMS_SHARED if kernel.function == "norm_backward" else 0
        assert kernel.shared + by_launch <= UNASKED_SHARED, kernel.name
        assert not kernel.source.startswith("attention") or not kernel.shared, kernel.name


@pytest.mark.skipif(not extension.built().archs, reason="LOUD: the library has no CUDA kernels")
@pytest.mark.parametrize("chip", MOST_SHARED)
def test_attention_asks_for_no_more_shared_memory_than_a_chip_has(chip: str) -> None:
    assert extension.load() == "", extension.load()
    for head_size in CUDA_HEAD_SIZES:
        for dropout, backward, any_order in itertools.product((False, True), repeat=3):
            asked = torch.ops.megalite.attention_shared_memory(
                head_size, dropout, backward, any_order, MOST_SHARED[chip]
            )
            assert 0 < asked <= MOST_SHARED[chip], (
                f"heads of {head_size}, {dropout=}, {backward=}, {any_order=}"
            )
