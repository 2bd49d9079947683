"""The CUDA kernels of activations and rotations, run by an emulator on the CPU: the same results as the CPU kernels."""

import ctypes
import shutil
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p

import pytest
import torch
from torch import Tensor

from tests.support.emulated_cuda import emulated
from tests.support.kernels import needs_library
from tests.support.parity import assert_rounded_alike

pytestmark = [
    needs_library,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the emulator with"),
]
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
SILU, GELU, GELU_TANH = range(3)


class Heads(ctypes.Structure):
    """The struct of the same name in csrc/rotary.h."""

    _fields_ = [
        ("source", c_void_p),
        ("target", c_void_p),
        ("source_strides", c_int64 * 3),
        ("target_strides", c_int64 * 3),
        ("heads", c_int64),
        ("turns", c_int),
    ]

    @classmethod
    def of(cls, source: Tensor, target: Tensor, turns: bool = True) -> "Heads":
        strides = ((c_int64 * 3)(*each.stride()[:3]) for each in (source, target))
        return cls(source.data_ptr(), target.data_ptr(), *strides, source.shape[2], turns)


class Angles(ctypes.Structure):
    _fields_ = [
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("positions", c_void_p),
        ("rows", c_int64),
        ("batch_stride", c_int64),
        ("interleaved", c_int),
        ("inverse", c_int),
    ]


@pytest.fixture(scope="module")
def activations(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Build the kernels with gridDim.y limited to 3, so that few rows need several layers along z."""
    limits = {"without": "kMostBlocks = 65535;", "but": "kMostBlocks = 3;"}
    return emulated("activations", tmp_path_factory.mktemp("activations"), **limits)


@pytest.fixture(scope="module")
def rotary(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated("rotary", tmp_path_factory.mktemp("rotary"))


def _call(function: Callable[..., int], tensors: tuple[Tensor | None, ...], *numbers: int) -> None:
    *sizes, activation, dtype = numbers
    pointers = [c_void_p(None if each is None else each.data_ptr()) for each in tensors]
    assert function(*pointers, *map(c_int64, sizes), c_int(activation), c_int(dtype), None) == 0


# Aligned rows over two tiles of columns, and unaligned rows; 13 tiles of rows, the last one not full.
SHAPES = [(torch.bfloat16, 51, 1032), (torch.float32, 50, 24), (torch.float16, 50, 9), (torch.float64, 7, 5)]


@pytest.mark.parametrize("activation", [SILU, GELU, GELU_TANH])
@pytest.mark.parametrize(("dtype", "rows", "features"), SHAPES)
def test_gated_activations(
    activations: ctypes.CDLL, dtype: torch.dtype, rows: int, features: int, activation: int
) -> None:
    gate_up, grad = torch.randn(rows, 2 * features).to(dtype), torch.randn(rows, features).to(dtype)
    made, made_grad = torch.full_like(grad, torch.nan), torch.full_like(gate_up, torch.nan)
    numbers = (rows, features, activation, DTYPES[dtype])
    _call(activations.megalite_glu_cuda, (gate_up, made), *numbers)
    _call(activations.megalite_glu_backward_cuda, (grad, gate_up, made_grad), *numbers)
    assert_rounded_alike(made, torch.ops.megalite.glu(gate_up, activation))
    assert_rounded_alike(made_grad, torch.ops.megalite.glu_backward(grad, gate_up, activation))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", [GELU, GELU_TANH])
@pytest.mark.parametrize(("dtype", "rows", "features"), SHAPES)
def test_bias_and_gelu(
    activations: ctypes.CDLL, dtype: torch.dtype, rows: int, features: int, activation: int, biased: bool
) -> None:
    inputs, grad = (torch.randn(rows, features).to(dtype) for _ in range(2))
    bias = torch.randn(features).to(dtype) if biased else None
    made, inputs_grad = torch.full_like(inputs, torch.nan), torch.full_like(inputs, torch.nan)
    bias_grad = torch.full((features,), torch.nan, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    partials = torch.full((-(-rows // 16), features), torch.nan, dtype=wide)
    numbers = (rows, features, activation, DTYPES[dtype])
    _call(activations.megalite_bias_gelu_cuda, (inputs, bias, made), *numbers)
    room = (bias_grad, partials) if biased else (None, None)
    _call(activations.megalite_bias_gelu_backward_cuda, (grad, inputs, bias, inputs_grad, *room), *numbers)
    assert_rounded_alike(made, torch.ops.megalite.bias_gelu(inputs, bias, activation))
    expected, expected_bias = torch.ops.megalite.bias_gelu_backward(grad, inputs, bias, activation)
    assert_rounded_alike(inputs_grad, expected)
    if biased:
        assert_rounded_alike(bias_grad, expected_bias)


def test_a_bias_off_16_bytes_is_read_all_the_same(activations: ctypes.CDLL) -> None:
    inputs, bias = torch.randn(4, 8), torch.randn(9)[1:]
    assert bias.data_ptr() % 16
    made = torch.full_like(inputs, torch.nan)
    _call(activations.megalite_bias_gelu_cuda, (inputs, bias, made), 4, 8, GELU, 0)
    assert_rounded_alike(made, torch.ops.megalite.bias_gelu(inputs, bias, GELU))


def _turn(
    rotary: ctypes.CDLL, parts: list[Heads], cosines: Tensor, sines: Tensor, like: Tensor, interleaved: bool
) -> None:
    batch, sequence, _, size = like.shape
    angles = Angles(cosines.data_ptr(), sines.data_ptr(), None, len(cosines), 0, interleaved, False)
    sizes = map(c_int64, (batch, sequence, size))
    called = rotary.megalite_rotary_cuda(
        (Heads * len(parts))(*parts), len(parts), ctypes.byref(angles), *sizes, DTYPES[like.dtype], None
    )
    assert called == 0


# Heads of 64 (aligned) and of 6 (unaligned); with 5 heads some threads have one head and some two.
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 64), (torch.float32, 64), (torch.float16, 6)])
def test_rotations(rotary: ctypes.CDLL, dtype: torch.dtype, size: int, interleaved: bool) -> None:
    heads, kv_heads = 60, 5
    qkv = torch.randn(2, 3, heads + 2 * kv_heads, size).to(dtype)
    cosines, sines = torch.randn(2, 3, size // 2).to(dtype)
    expected = torch.ops.megalite.rotary_split(qkv, heads, kv_heads, cosines, sines, None, interleaved)
    made = [torch.full_like(each, torch.nan) for each in expected]
    split = qkv.split([heads, kv_heads, kv_heads], dim=2)
    parts = [Heads.of(*each, turns=which < 2) for which, each in enumerate(zip(split, made, strict=True))]
    _turn(rotary, parts, cosines, sines, qkv, interleaved)
    for one, two in zip(made, expected, strict=True):
        assert_rounded_alike(one, two)


def test_more_rows_than_a_grid_has_blocks_across(rotary: ctypes.CDLL) -> None:
    heads = torch.randn(65537, 1, 1, 2)
    cosines, sines = torch.randn(2, 1, 1)
    made, expected = torch.full_like(heads, torch.nan), heads.clone()
    torch.ops.megalite.rotary_(expected, cosines, sines, None, False)
    _turn(rotary, [Heads.of(heads, made)], cosines, sines, heads, False)
    assert_rounded_alike(made, expected)
