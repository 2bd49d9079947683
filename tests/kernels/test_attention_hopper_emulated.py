"""The attention kernel for compute capability 9.0 without a GPU: its own source on emulated threads, against float64.

tests/kernels/emulator/cuda/hopper.cuh does what the PTX ISA says of barriers, copies of boxes and products of warp
groups: operands are found by their descriptors, exchanged as the copies exchange them, and whatever is under way gives
NaN until it is waited for. What a chip makes of it, and how fast, is not to be seen here.
"""

import ctypes
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support import emulator
from tests.support.attention import Packed, attention, starts
from tests.support.emulated_cuda import emulated, in_order
from tests.support.kernels import assert_no_worse
from tests.support.parity import FLOAT32_RTOL, assert_close

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="no C++ compiler")

DTYPES = {torch.bfloat16: 2, torch.float16: 3}
UNSUPPORTED = -1
# Blocks are of 192 queries, 128 where heads are wide, and of 128 keys. The rings have four stages, or two.
CASES = {
    "documents": Packed((150, 1, 0, 300), (150, 1, 0, 300), heads=1),
    "unmasked": Packed((70, 40), (400, 7), right=-1),
    "longer than the ring": Packed((40,), (800,), right=-1, heads=1),
    "a cache": Packed((10, 130), (300, 133), heads=2, kv_heads=2),
    "rows that see nothing": Packed((200,), (70,), heads=1),
    "window": Packed((250,), (330,), left=60, heads=1),
    "band": Packed((150,), (130,), left=20, right=15, heads=1),
    "wide heads": Packed((140, 3), (140, 3), head_size=128),
    "wide heads, longer than the ring": Packed((150,), (520,), head_size=128, heads=1),
    "wide heads in a window": Packed((130,), (300,), left=40, head_size=128, heads=1),
}
GUARD = 3  # rows behind the results that nobody may write


@dataclass
class Hopper:
    """The C interface of cuda/attention_hopper_64.cu or its twin."""

    library: ctypes.CDLL
    head_size: int

    def forward(self, packed: Packed, inputs: list[Tensor], order: int) -> tuple[int, Tensor, Tensor, str]:
        """What the call returned; output; log-sum-exps; what the emulator has to say."""
        ends = starts(packed.queries), starts(packed.keys)
        tokens, heads, head_size = inputs[0].shape
        output = torch.full((tokens + GUARD, heads, head_size), float("nan"), dtype=inputs[0].dtype)
        sums = torch.full((heads * tokens + GUARD,), float("nan"))
        told = emulator.problem(packed, *inputs, ends)
        told.output, told.lse = output.data_ptr(), sums.data_ptr()
        in_order(self.library, order)
        problem = ctypes.c_char_p.in_dll(self.library, "megalite_emulator_problem")
        problem.value = None
        function = getattr(self.library, f"megalite_attention_forward_hopper_{self.head_size}_cuda")
        code = function(ctypes.byref(told), DTYPES[inputs[0].dtype], None)
        assert output[tokens:].isnan().all() and sums[heads * tokens :].isnan().all()
        lse = sums[: heads * tokens].view(heads, tokens)
        return code, output[:tokens], lse, (problem.value or b"").decode()


@pytest.fixture(scope="module")
def hoppers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Hopper]:
    """The kernels by their head size."""
    folder = tmp_path_factory.mktemp("hopper")
    return {size: Hopper(emulated(f"attention_hopper_{size}", folder), size) for size in (64, 128)}


def _check(packed: Packed, inputs: list[Tensor], output: Tensor, lse: Tensor) -> None:
    exact, exact_lse = attention(packed, *(each.double() for each in inputs))
    assert_no_worse(output, attention(packed, *inputs)[0], exact, what="output")
    nothing = exact_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), nothing)
    assert_close(lse[~nothing], exact_lse[~nothing], rtol=FLOAT32_RTOL, what="log-sum-exps")


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_forward(hoppers, case, order) -> None:
    packed = CASES[case]
    inputs = packed.inputs([*DTYPES][(len(case) + order) % 2])
    code, output, lse, problem = hoppers[packed.head_size].forward(packed, inputs, order)
    assert (code, problem) == (0, "")
    _check(packed, inputs, output, lse)
