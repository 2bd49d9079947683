"""The CUDA kernels of the norms, run by an emulator on the CPU: the same results as the CPU kernels.

Tests every block shape that row lengths lead to, in several thread orders that the barriers allow.
"""

import ctypes
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.emulated_cuda import emulated, in_order, races
from tests.support.kernels import needs_library
from tests.support.parity import assert_rounded_alike
from tests.support.selection import cases

pytestmark = [
    needs_library,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the emulator with"),
]
EPS = 1e-5
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
# Columns for each block shape: one, two and four 16-byte packs per lane of one warp; two and four packs per thread of
# several warps, the last one not full.
COLUMNS = {torch.float32: (8, 96, 256, 508, 516, 4100), torch.bfloat16: (16, 264, 1000, 1032, 8200)}
# Unaligned rows and float64: the kernels that read a row again.
RAGGED = [
    (torch.float32, 7),
    (torch.float32, 301),
    (torch.bfloat16, 9),
    (torch.float16, 44),
    (torch.float64, 300),
]
CASES = [(dtype, columns) for dtype, each in COLUMNS.items() for columns in each] + RAGGED


@dataclass
class EmulatedNorms:
    """The C interface of cuda/norms.cu as functions of CPU tensors, whose outputs start as NaN."""

    library: ctypes.CDLL

    def norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        rows, wide = len(x), torch.promote_types(x.dtype, torch.float32)
        total, output = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        mean, inverse = (torch.full((rows,), torch.nan, dtype=wide) for _ in range(2))
        made = (total if residual is not None else None, output, mean if bias is not None else None, inverse)
        self._call("forward", (x, residual, weight, bias, *made), (*x.shape, EPS, DTYPES[x.dtype]))
        return total if residual is not None else x, output, mean, inverse

    def backward(
        self,
        grad: Tensor,
        sum_grad: Tensor | None,
        x: Tensor,
        weight: Tensor,
        mean: Tensor | None,
        inverse: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return all gradients, after checking that separate calls and one call give the same bits."""
        sums, blocks = 1 if mean is None else 2, 2  # so few that each block loops over its rows
        results = []
        for of_x, of_weight in ((True, True), (True, False), (False, True)):
            x_grad, weight_grad, bias_grad = (
                torch.full_like(each, torch.nan) for each in (x, weight, weight)
            )
            partials = torch.full((blocks, sums, x.shape[1]), torch.nan, dtype=inverse.dtype)
            outputs = (x_grad if of_x else None, weight_grad if of_weight else None)
            outputs += (bias_grad if of_weight and mean is not None else None, partials)
            inputs = (grad, sum_grad, x, weight if of_x else None, mean, inverse)
            self._call("backward", inputs + outputs, (blocks, *x.shape, DTYPES[x.dtype]))
            results.append((x_grad, weight_grad, bias_grad))
        (x_grad, weight_grad, bias_grad), (x_alone, *_), (_, weight_alone, bias_alone) = results
        assert torch.equal(x_grad, x_alone) and torch.equal(weight_grad, weight_alone)
        assert mean is None or torch.equal(bias_grad, bias_alone)
        return (x_grad, weight_grad) if mean is None else (x_grad, weight_grad, bias_grad)

    def _call(self, what: str, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> None:
        pointers = [ctypes.c_void_p(None if each is None else each.data_ptr()) for each in tensors]
        *sizes, dtype = numbers
        values = [
            ctypes.c_double(each) if isinstance(each, float) else ctypes.c_int64(each) for each in sizes
        ]
        function = getattr(self.library, f"megalite_norm_{what}_cuda")
        assert function(*pointers, *values, ctypes.c_int(int(dtype)), None) == 0


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> EmulatedNorms:
    return EmulatedNorms(emulated("norms", tmp_path_factory.mktemp("norms")))


def _inputs(rows: int, columns: int, dtype: torch.dtype) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rows * 10000 + columns)
    for shape in ((rows, columns),) * 4 + ((columns,),) * 2:
        yield torch.randn(shape, generator=generator, dtype=torch.float64).add(0.25).to(dtype)


def _run(
    gpu: EmulatedNorms, rows: int, columns: int, dtype: torch.dtype, centred: bool, add: bool
) -> list[Tensor]:
    """Compare forward and backward of the emulated kernels with the CPU kernels."""
    x, residual, grad, sum_grad, weight, bias = _inputs(rows, columns, dtype)
    shift, other, passed = bias if centred else None, residual if add else None, sum_grad if add else None
    total, output, mean, inverse = gpu.norm(x, other, weight, shift)
    expected_sum, *expected = torch.ops.megalite.norm(x, other, weight, shift, EPS)
    assert not add or torch.equal(total, expected_sum)
    centre = mean if centred else None
    gradients = gpu.backward(grad, passed, total, weight, centre, inverse)
    wanted = torch.ops.megalite.norm_backward(grad, passed, total, weight, centre, inverse)
    made = [output, *([mean] if centred else []), inverse, *gradients]
    wanted = [expected[0], *([expected[1]] if centred else []), expected[2], *wanted[: 2 + centred]]
    for one, two in zip(made, wanted, strict=True):
        assert_rounded_alike(one, two)
    return made


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(("dtype", "columns"), cases(CASES, core=[(torch.float32, 516), *RAGGED[-3:]]))
def test_the_kernels_compute_what_the_cpus_do(
    gpu: EmulatedNorms, dtype: torch.dtype, columns: int, centred: bool
) -> None:
    in_order(gpu.library, 0)
    _run(gpu, 37 if columns <= 128 else 5, columns, dtype, centred, add=True)


@pytest.mark.parametrize("columns", [96, 301])
def test_without_a_residual(gpu: EmulatedNorms, columns: int) -> None:
    in_order(gpu.library, 0)
    _run(gpu, 3, columns, torch.float32, True, add=False)
    _run(gpu, 3, columns, torch.float32, False, add=False)


@pytest.mark.parametrize(("dtype", "columns"), [(torch.bfloat16, 1032), (torch.float32, 301)])
def test_any_order_of_threads_gives_the_same_bits(
    gpu: EmulatedNorms, dtype: torch.dtype, columns: int
) -> None:
    in_order(gpu.library, 0)
    first = _run(gpu, 5, columns, dtype, True, add=True)
    for order in (1, 2, 3):
        in_order(gpu.library, order)
        assert all(map(torch.equal, _run(gpu, 5, columns, dtype, True, add=True), first))


def test_a_barrier_too_few_is_seen(tmp_path: Path) -> None:
    broken = EmulatedNorms(emulated("norms", tmp_path, without="__syncthreads();"))
    with pytest.raises(AssertionError):
        for order in (0, 1, 2):
            in_order(broken.library, order)
            _run(broken, 5, 516, torch.float32, True, add=True)


@pytest.mark.slow
def test_the_thread_sanitizer_sees_no_race_and_one_where_a_barrier_is_missing(tmp_path: Path) -> None:
    said = races("norms", tmp_path)
    assert "data race" not in said, said
    assert "data race" in races("norms", tmp_path, without="__syncthreads();")
