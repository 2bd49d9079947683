"""The emulator has a chip's limits: each planted launch or kernel that breaks one gets the chip's error."""

import ctypes
import shutil

import pytest

from tests.support.emulated_cuda import of_source, on_chip

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the emulator with")
INVALID_VALUE, INVALID_CONFIGURATION, MISALIGNED_ADDRESS = 1, 9, 716
KIB = 1024
# Shared memory per block in KiB by compute capability, from the CUDA C++ Programming Guide.
MOST_SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
KERNELS = r"""
#include <cstdint>
#include <cuda_runtime.h>

__global__ void nothing() {}

__global__ void move(const float* from, float* to) {
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}

__global__ void add_up(float* sum, int lanes) {
  if (threadIdx.x >= lanes) return;
  float value = 1;
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  if (threadIdx.x == 0) *sum = value;
}

__global__ void pair_up(float* sum, unsigned mask) {
  const float value = __shfl_xor_sync(mask, 1.0f, 16);
  if (threadIdx.x == 0) *sum = value;
}

extern "C" {

int ask(int bytes) { return cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); }
int last() { return cudaGetLastError(); }
int run(unsigned x, unsigned y, unsigned z, unsigned threads, unsigned deep, int bytes) {
  nothing<<<dim3(x, y, z), dim3(threads, 1, deep), bytes, nullptr>>>();
  return cudaGetLastError();
}
int copy(const float* from, float* to) {
  move<<<1, 1, 0, nullptr>>>(from, to);
  return cudaGetLastError();
}
void sum_lanes(float* sum, int lanes, unsigned threads) { add_up<<<1, threads, 0, nullptr>>>(sum, lanes); }
void sum_pairs(float* sum, unsigned mask) { pair_up<<<1, 32, 0, nullptr>>>(sum, mask); }
}
"""


@pytest.fixture(scope="module")
def chip(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return of_source(KERNELS, tmp_path_factory.mktemp("limits"))


@pytest.mark.parametrize("capability", MOST_SHARED)
def test_shared_memory(chip: ctypes.CDLL, capability: int) -> None:
    on_chip(chip, capability)
    most = MOST_SHARED[capability] * KIB
    assert chip.ask(most) == 0 and chip.run(1, 1, 1, 32, 1, most) == 0
    assert chip.run(1, 1, 1, 32, 1, most + 1) == INVALID_VALUE
    assert chip.ask(48 * KIB) == 0 and chip.run(1, 1, 1, 32, 1, 48 * KIB + 1) == INVALID_VALUE
    assert chip.ask(most + 1) == INVALID_VALUE
    assert chip.last() == INVALID_VALUE
    assert chip.last() == 0


@pytest.mark.parametrize(
    "launch",
    [
        (1, 65536, 1, 1, 1, 0), (1, 1, 65536, 1, 1, 0), (2**31, 1, 1, 1, 1, 0), (0, 1, 1, 1, 1, 0),
        (1, 0, 1, 1, 1, 0), (1, 1, 1, 1025, 1, 0), (1, 1, 1, 0, 1, 0), (1, 1, 1, 8, 65, 0), (1, 1, 1, 32, 33, 0),
    ],
    ids=str,
)  # fmt: skip
def test_grids_and_blocks(chip: ctypes.CDLL, launch: tuple[int, ...]) -> None:
    assert chip.run(*launch) == INVALID_CONFIGURATION
    assert chip.run(1, 1, 1, 1, 1, 0) == 0


def test_the_largest_grid_in_y_and_the_largest_block_are_taken(chip: ctypes.CDLL) -> None:
    assert chip.run(1, 65535, 1, 1, 1, 0) == 0
    assert chip.run(1, 1, 1, 1024, 1, 0) == 0


def test_an_error_that_nobody_took_shows_in_the_next_check(chip: ctypes.CDLL) -> None:
    on_chip(chip, 86)
    assert chip.ask(100 * KIB) == INVALID_VALUE
    assert chip.run(1, 1, 1, 1, 1, 0) == INVALID_VALUE, "a launch that succeeds clears nothing"
    assert chip.run(1, 1, 1, 1, 1, 0) == 0


def test_a_misaligned_vector_is_an_error(chip: ctypes.CDLL) -> None:
    values = (ctypes.c_float * 12)(*range(12))
    begin = ctypes.addressof(values) + -ctypes.addressof(values) % 16
    for shift, expected in ((0, 0), (4, MISALIGNED_ADDRESS), (8, MISALIGNED_ADDRESS)):
        made = (ctypes.c_float * 8)()
        to = ctypes.addressof(made) + -ctypes.addressof(made) % 16
        assert chip.copy(ctypes.c_void_p(begin + shift), ctypes.c_void_p(to)) == expected


def test_a_shuffle_whose_mask_names_a_lane_that_left_is_told(chip: ctypes.CDLL) -> None:
    problem = ctypes.c_char_p.in_dll(chip, "megalite_emulator_problem")
    made = ctypes.c_float()
    for lanes, threads, said in (
        (32, 32, None),
        (16, 32, b"exited"),
        (31, 32, b"exited"),
        (24, 24, b"exited"),
    ):
        for order in (0, 1, 2):
            ctypes.c_uint.in_dll(chip, "megalite_emulator_order").value = order
            problem.value = None
            chip.sum_lanes(ctypes.byref(made), lanes, threads)
            assert (problem.value is None and made.value == 32) if said is None else said in problem.value
    for mask, said in ((0xFFFFFFFF, None), (0xFFFFFFFE, b"own lane"), (0x0000FFFF, b"own lane")):
        problem.value = None
        chip.sum_pairs(ctypes.byref(made), mask)
        assert problem.value is None if said is None else said in problem.value
