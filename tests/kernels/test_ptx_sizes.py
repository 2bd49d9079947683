"""Tensors of more than 2^31 elements, and grids of more than 65535 rows: the last blocks of real launches, interpreted.

The tensors are reserved address space without memory until they are written, so that every offset is real; only the
blocks of a grid that a test checks are run.
"""

import ctypes
import mmap
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.test_ptx_kernels import Angles, Heads
from tests.support import emulator
from tests.support.attention import Packed, starts
from tests.support.parity import BF16_RTOL, assert_close
from tests.support.ptx.build import WHY_NOT
from tests.support.ptx.device import Device
from tests.support.ptx.machine import Launch
from tests.support.ptx.memory import Fault

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
HUGE = 2**31
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap has from 3.12 on


def sparse(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return zeros that take no memory until they are written."""
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(space, dtype=dtype, count=count).view(shape)


def last(count: int) -> Callable[[Launch], range]:
    return lambda launch: range(max(0, launch.blocks - count), launch.blocks)


def device(name: str, chosen: Callable[[Launch], range] | None = None) -> Device:
    return Device(name, watched=False, chosen=chosen or last(8))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(made: Tensor, exact: Tensor) -> None:
    assert_close(made, exact, rtol=BF16_RTOL)


@pytest.mark.parametrize("columns", [1032, 1031], ids=["in registers", "read again"])
def test_norms(columns: int) -> None:
    rows, dtype = HUGE // columns + 3, torch.bfloat16
    x, output = sparse(rows, columns, dtype=dtype), sparse(rows, columns, dtype=dtype)
    mean, inverse = torch.zeros(rows), torch.zeros(rows)
    weight, bias = random(columns), random(columns + 1)[:-1]
    x[-1] = random(columns)
    arguments = (x, None, weight, bias, None, output, mean, inverse, rows, columns, 1e-5, dtype)
    assert device("norms").call("megalite_norm_forward_cuda", *arguments) == 0
    wide = [each.double() for each in (x[-1], weight, bias)]
    assert_near(output[-1], F.layer_norm(wide[0], (columns,), wide[1], wide[2], 1e-5))
    assert_near(mean[-1], wide[0].mean())


@pytest.mark.parametrize("features", [64, 9], ids=["packs", "single values"])
@pytest.mark.extended
def test_gated_activations(features: int) -> None:
    rows, dtype = HUGE // features + 3, torch.bfloat16
    gate_up, out = sparse(rows, 2 * features, dtype=dtype), sparse(rows, features, dtype=dtype)
    gate_up[-1] = random(2 * features)
    silu = ctypes.c_int(0)
    assert (
        device("activations", last(1024)).call("megalite_glu_cuda", gate_up, out, rows, features, silu, dtype)
        == 0
    )
    gate, up = gate_up[-1].double().chunk(2)
    assert_near(out[-1], F.silu(gate) * up)


@pytest.mark.extended
def test_cross_entropy() -> None:
    columns, dtype = 8200, torch.bfloat16
    rows = HUGE // columns + 3
    logits, labels = sparse(rows, columns, dtype=dtype), torch.full((rows,), 77)
    weights, statistics = torch.ones(rows), torch.zeros(3, rows)
    logits[-1] = random(columns)
    given, sizes = logits[-1].double(), (rows, columns, 0, 1.0, 0.0, dtype)
    run = device("cross_entropy")
    assert (
        run.call("megalite_cross_entropy_statistics_cuda", logits, labels, weights, statistics, *sizes) == 0
    )
    assert statistics[0, -1] == given.max()
    assert_near(statistics[1, -1], (given - given.max()).exp().sum())
    factors = weights / statistics[1].clamp(min=1)
    # gridDim.y counts the blocks of a row.
    whole = device("cross_entropy", lambda launch: range(launch.grid[0] - 1, launch.blocks, launch.grid[0]))
    arguments = (labels, statistics[0].contiguous(), factors, weights)
    assert whole.call("megalite_cross_entropy_gradient_cuda", logits, *arguments, *sizes) == 0
    assert_near(logits[-1], given.softmax(0) - F.one_hot(torch.tensor(77), columns))


@pytest.mark.extended
def test_adamw() -> None:
    size = HUGE + 4099
    weight, gradient = sparse(size, dtype=torch.float32), sparse(size, dtype=torch.bfloat16)
    gradient[-1], weight[-1], gradient[-4099] = 2, 1, 3
    arguments = (weight, gradient, size, torch.float32, torch.bfloat16)
    assert device("adamw").call("megalite_adamw_accumulate_cuda", *arguments) == 0
    assert weight[-1] == 3 and weight[-4099] == 3


def _rotated(run: Device, given: Tensor, made: Tensor) -> None:
    """Rotate [batch, sequence, heads, head_dim] by positions 0, 1, ..; check the last token."""
    batch, sequence, heads, head_dim = given.shape
    table = torch.arange(sequence).unsqueeze(1) * torch.linspace(1, 0.1, head_dim // 2)
    cosines, sines = (each.to(given.dtype) for each in (table.cos(), table.sin()))
    strides = [(ctypes.c_int64 * 3)(*each.stride()[:3]) for each in (given, made)]
    parts = (Heads * 1)(Heads(given.data_ptr(), made.data_ptr(), *strides, heads, 1))
    angles = Angles(cosines.data_ptr(), sines.data_ptr(), None, sequence, 0, 0, 0)
    touched = [given, made, cosines, sines]
    arguments = (parts, ctypes.c_int(1), ctypes.byref(angles), batch, sequence, head_dim, given.dtype)
    expected = given[-1, -1].double()
    assert run.call("megalite_rotary_cuda", *arguments, touched=touched) == 0
    low, high = expected.chunk(2, dim=-1)
    cosine, sine = cosines[-1].double(), sines[-1].double()
    assert_near(made[-1, -1], torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1))


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.extended
def test_rotary_with_strides_beyond_32_bits(in_place: bool) -> None:
    space = sparse(2, 2, 3, HUGE // 4, dtype=torch.bfloat16)
    given = space[..., -64:]
    given[-1, -1] = random(3, 64)
    _rotated(device("rotary"), given, given if in_place else torch.zeros(given.shape, dtype=given.dtype))


@pytest.mark.extended
def test_rotary_of_more_rows_than_a_grid_has_in_y() -> None:
    given = random(70001, 1, 1, 16)
    _rotated(device("rotary"), given, torch.zeros_like(given))


def test_indices_of_32_bits_are_seen() -> None:
    """Plant 32-bit overflow in the products of the kernels' index arithmetic."""

    def cut_off(text: str) -> str:
        product = r"(mul\.lo\.s64\s+(%rd\d+), [^;]*;)"
        return re.sub(product, r"\1 shl.b64 \2, \2, 32; shr.s64 \2, \2, 32;", text)

    columns, dtype = 1032, torch.bfloat16
    rows = HUGE // columns + 3
    x, output = sparse(rows, columns, dtype=dtype), sparse(rows, columns, dtype=dtype)
    mean, inverse, weight = torch.zeros(rows), torch.zeros(rows), random(columns)
    arguments = (x, None, weight, weight, None, output, mean, inverse, rows, columns, 1e-5, dtype)
    run = Device("norms", watched=False, chosen=last(8), broken=cut_off)
    with pytest.raises(Fault, match="outside of every allocation"):
        run.call("megalite_norm_forward_cuda", *arguments)


@pytest.mark.extended
def test_attention_of_more_sequences_than_a_grid_has_in_z() -> None:
    """With sequences of one token each, the output is the token's value."""
    sequences = 65537
    packed = Packed((1,) * sequences, (1,) * sequences, heads=1)
    inputs = [random(sequences, 1, 64) for _ in range(3)]
    output, lse = torch.zeros_like(inputs[0]), torch.zeros(1, sequences)
    ends = starts(packed.queries), starts(packed.keys)
    told = emulator.problem(packed, *inputs, ends)
    told.output, told.lse = output.data_ptr(), lse.data_ptr()
    run = device("attention_forward_64", last(2))
    touched = [*inputs, output, lse, *ends]
    assert (
        run.call("megalite_attention_forward_64_cuda", ctypes.byref(told), output.dtype, touched=touched) == 0
    )
    assert torch.equal(output[-1], inputs[2][-1])
