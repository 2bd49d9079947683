"""The attention kernel for compute capability 9.0 without a GPU: its own source on emulated threads, against float64.

tests/kernels/emulator/cuda/hopper.cuh implements mbarriers, TMA and wgmma as the PTX ISA defines them: operands are
addressed by descriptors with swizzles, and pending copies and products give NaN until they are waited for. Machine code
and speed are not tested here.
"""

import ctypes
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support import emulator
from tests.support.attention import Packed, attention, starts
from tests.support.emulated_cuda import emulated, in_order, races
from tests.support.parity import BF16_RTOL, FLOAT32_RTOL, assert_close, assert_no_worse, relative_error
from tests.support.selection import cases

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="no C++ compiler")

DTYPES = {torch.bfloat16: 2, torch.float16: 3}
UNSUPPORTED = -1
# Blocks have 192 queries (128 for heads of 128) and 128 keys. The circular buffers have four stages (two).
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
GUARD = 3  # rows after the results that must not be written


@dataclass
class Hopper:
    """The C interface of cuda/attention_hopper_64.cu or attention_hopper_128.cu."""

    library: ctypes.CDLL
    head_size: int

    def forward(self, packed: Packed, inputs: list[Tensor], order: int) -> tuple[int, Tensor, Tensor, str]:
        """Return the call's return code, output, log-sum-exps and the emulator's complaint."""
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
    """Return head size -> kernel."""
    folder = tmp_path_factory.mktemp("hopper")
    return {size: Hopper(emulated(f"attention_hopper_{size}", folder), size) for size in (64, 128)}


def _check(packed: Packed, inputs: list[Tensor], output: Tensor, lse: Tensor) -> None:
    exact, exact_lse = attention(packed, *(each.double() for each in inputs))
    assert_no_worse(output, attention(packed, *inputs)[0], exact, what="output")
    nothing = exact_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), nothing)
    assert_close(lse[~nothing], exact_lse[~nothing], rtol=FLOAT32_RTOL, what="log-sum-exps")


@pytest.mark.parametrize("order", cases([0, 1, 2], core=[1]))
@pytest.mark.parametrize("case", cases(CASES, core=["documents", "wide heads"]))
def test_forward(hoppers, case, order) -> None:
    packed = CASES[case]
    inputs = packed.inputs([*DTYPES][(len(case) + order) % 2])
    code, output, lse, problem = hoppers[packed.head_size].forward(packed, inputs, order)
    assert (code, problem) == (0, "")
    _check(packed, inputs, output, lse)


@pytest.mark.extended
def test_any_order_gives_the_same_bits(hoppers) -> None:
    packed = Packed((130, 40), (400, 150), heads=1)
    inputs = packed.inputs(torch.float16)
    first, *others = (hoppers[64].forward(packed, inputs, order)[1:3] for order in range(5))
    assert all(torch.equal(each[i], first[i]) for each in others for i in range(2))


@pytest.mark.extended
def test_more_sequences_than_a_launch_takes(tmp_path) -> None:
    limits = {"without": "kMostSequences = 65535;", "but": "kMostSequences = 2;"}
    limited = Hopper(emulated("attention_hopper_64", tmp_path, **limits), 64)
    packed = Packed((30, 1, 0, 20, 40), (30, 1, 0, 20, 40), heads=1)
    inputs = packed.inputs(torch.bfloat16)
    code, output, lse, problem = limited.forward(packed, inputs, 0)
    assert (code, problem) == (0, "")
    _check(packed, inputs, output, lse)


@pytest.mark.extended
@pytest.mark.parametrize("head_size", [64, 128])
def test_documents_know_nothing_of_each_other(hoppers, head_size) -> None:
    """Setting another document to NaN changes no bit of this one, although this one's last tile covers its rows."""
    packed = Packed((30, 70, 5), (30, 70, 5), heads=1, right=-1, head_size=head_size)
    inputs = packed.inputs(torch.bfloat16)
    leaked = [each.detach().clone() for each in inputs]
    for each in leaked:
        each[30:100] = float("nan")
    for order in (0, 1):
        runs = [hoppers[head_size].forward(packed, given, order) for given in (inputs, leaked)]
        assert [(code, problem) for code, _, _, problem in runs] == [(0, "")] * 2
        for own in (slice(0, 30), slice(100, 105)):
            assert torch.equal(runs[0][1][own], runs[1][1][own])
            assert torch.equal(runs[0][2][:, own], runs[1][2][:, own])


def test_what_it_cannot_do_is_left_to_the_other_kernel(hoppers, monkeypatch) -> None:
    packed = Packed((5,), (9,), heads=1)
    query, key, value = packed.inputs(torch.bfloat16)
    run = hoppers[64].forward
    assert run(packed, [query, key, value], 0)[0] == 0
    padded = torch.zeros(9, 1, 68, dtype=torch.bfloat16)[..., :64]  # 136 bytes from row to row
    assert run(packed, [query, padded, value], 0)[0] == UNSUPPORTED
    assert run(Packed((5,), (0,), heads=1), [query, key[:0], value[:0]], 0)[0] == UNSUPPORTED
    monkeypatch.setenv("MEGALITE_NO_HOPPER", "1")
    assert run(packed, [query, key, value], 0)[0] == UNSUPPORTED


# Statements that must not be removed: those that order threads, copies and products, and descriptor fields.
NEEDED = {
    "hopper::wait(block.keys_empty(tile), block.parity(tile) ^ 1);": False,
    "hopper::wait(block.values_empty(tile), block.parity(tile) ^ 1);": True,
    "hopper::wait(block.keys_full(tile), block.parity(tile));": True,
    "hopper::wait(block.values_full(tile - 1), block.parity(tile - 1));": False,
    "hopper::wait(block.queries_full(), 0);": True,
    "hopper::wait(block.values_landed(), 0);": True,
    "hopper::wait_products<1>(scores[0]);": False,
    "hopper::wait_products<0>(sums[0]);": True,
    "hopper::begin_products();": True,
    "hopper::publish_barriers();": True,
    "hopper::publish_stores();": False,
    "m.sync();": True,
    "release(block.values_empty(tile - 1));": True,
    "if (group == 0 && last > 0) hopper::arrive(Shape::kTurns, 2 * hopper::kGroup);": True,
    " && last > 0": True,
    "kExchanged | ": True,
    "kEight << 32 | ": True,
    "static_cast<uint64_t>(halves >> 4) << 16 | ": True,
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=[pytest.mark.slow] * slow) for text, slow in NEEDED.items()]
)
def test_nothing_of_it_may_be_left_out(tmp_path, text) -> None:
    """Removing a needed statement gives wrong results in some order, or a complaint of the emulator."""
    broken = Hopper(emulated("attention_hopper_128", tmp_path, without=text), 128)
    packed = Packed((120, 9), (600, 20), heads=1, right=-1, head_size=128)
    inputs = packed.inputs(torch.bfloat16)
    with torch.no_grad():
        for each in inputs[1:]:
            each[600:] = float("nan")  # the other document, of which nothing is looked at
    exact = attention(packed, *(each.double() for each in inputs))[0][:120]
    for order in range(6):
        code, output, _, problem = broken.forward(packed, inputs, order)
        assert code == 0
        if problem or not relative_error(output[:120], exact) <= BF16_RTOL:
            return
    pytest.fail("it made no difference")


@pytest.mark.slow
def test_the_thread_sanitizer_sees_no_race_and_one_where_a_wait_is_missing(tmp_path) -> None:
    name, *needed = "attention_hopper_128", *list(NEEDED)[:2]
    said = races(name, tmp_path)
    assert "data race" not in said, said
    for text in needed:
        assert "data race" in races(name, tmp_path, without=text), text
