"""The arithmetic of the cross entropy's CUDA kernels, run on the host one thread after another, against float64."""

import ctypes
import shutil
import subprocess
from ctypes import c_double, c_int, c_int64, c_void_p
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.ops.cross_entropy import Targets, shard_statistics, write_gradient
from megalite.ops.extension import SOURCES
from tests.support.kernels import DTYPES
from tests.support.parity import assert_no_worse
from tests.support.selection import cases

COMPILER = shutil.which("g++") or shutil.which("c++")
SOURCE = Path(__file__).parent / "emulator" / "cross_entropy.cpp"
DEVICE = SOURCE.parent / "device"
"""Replacements of csrc/core headers that compute their GPU branches."""
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("emulator") / "cross_entropy.so"
    # Out-of-bounds and misaligned accesses end the process.
    command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-fsanitize=undefined"]
    command += ["-fno-sanitize-recover=alignment", "-static-libubsan", f"-I{DEVICE}", f"-I{SOURCES}"]
    subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def of_threads(
    emulated: ctypes.CDLL, logits: Tensor, targets: Targets, weights: Tensor, threads: int
) -> Tensor:
    """Return the statistics; overwrite the logits with their gradient."""
    statistics = torch.full((3, len(logits)), float("nan"), dtype=weights.dtype)
    pointers = [c_void_p(each.data_ptr()) for each in (logits, targets.labels, weights, statistics)]
    sizes = [c_int64(size) for size in (*logits.shape, targets.first_id)]
    shares = [c_double(targets.on_label), c_double(targets.uniform)]
    emulated.run_cross_entropy(*pointers, *sizes, *shares, c_int(threads), c_int(DTYPE_CODES[logits.dtype]))
    return statistics


# The DType codes of core/scalar.h.
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def in_torch(logits: Tensor, targets: Targets, weights: Tensor) -> tuple[Tensor, Tensor]:
    given = logits.clone()
    statistics = shard_statistics(given, weights, targets)
    write_gradient(given, statistics[0], weights / statistics[1], weights, targets)
    return statistics, given


@pytest.mark.parametrize("dtype", cases(DTYPES, core=[torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("uniform", [0.0, 1e-4])
@pytest.mark.parametrize(
    ("columns", "threads"),
    [(1, 32), (3, 32), (17, 128), (1031, 32), (4096, 128), (5003, 512)],
    ids=lambda value: str(value),
)
def test_threads_give_what_torch_gives(emulated, columns, threads, uniform, dtype):
    # Rows of odd lengths start at every offset within 16 bytes.
    logits = (3 * torch.randn(9, columns)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    targets = Targets(torch.randint(columns + 4, (9,)) + 8, 10, 1 - uniform, uniform)
    weights = torch.rand(9, dtype=wide)
    exact = in_torch(logits.double(), targets, weights.double())
    plain = in_torch(logits.to(wide), targets, weights)
    statistics = of_threads(emulated, logits, targets, weights, threads)
    assert torch.equal(statistics[0], plain[0][0])
    for row, what in ((1, "sums"), (2, "expected logits")):
        assert_no_worse(statistics[row], plain[0][row], exact[0][row], what=what)
    assert_no_worse(logits, plain[1].to(dtype), exact[1], what="gradient")


def test_what_is_masked_or_infinite_is_as_on_the_cpu(emulated):
    logits = torch.randn(4, 1031)
    logits[0, 5:] = float("-inf")
    logits[1, 700], logits[2] = float("inf"), float("nan")
    targets, weights = Targets(torch.tensor([2, 3, 4, 5]), 0), torch.tensor([1.0, 1.0, 0.0, 1.0])
    statistics = of_threads(emulated, logits, targets, weights, 128)
    assert statistics.isfinite().all(dim=0).tolist() == [True, False, False, True]
    assert not logits[0, 5:].any() and logits[[0, 3]].isfinite().all()


def test_rows_beside_a_shard_stay_as_they_are(emulated):
    for columns in (1, 7, 33):
        whole = torch.full((5, columns), 7.0)
        targets, weights = Targets(torch.zeros(3, dtype=torch.int64), 0), torch.ones(3)
        of_threads(emulated, whole[1:4], targets, weights, 32)
        assert whole[[0, 4]].eq(7).all() and not whole[1:4].eq(7).any()
