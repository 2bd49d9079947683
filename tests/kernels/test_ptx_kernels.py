"""The small CUDA kernels as nvcc compiles them: their PTX, launched by their own host code and interpreted on the CPU.

Runs the `__CUDA_ARCH__` branches and the inline assembly that a GPU runs. The tolerance is that of the CPU kernels; no
access may be out of bounds, misaligned, a race, or a read of uninitialised memory.
"""

import ctypes
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.activations import bias_gelu, geglu, swiglu
from megalite.ops.adamw import AdamWRule, AdamWTensors, accumulate_, adamw_
from megalite.ops.cross_entropy import Targets, shard_statistics, write_gradient
from megalite.ops.expert_rows import RowOrder, tokens_of_rows
from megalite.ops.norms import rms_norm
from megalite.ops.rotary import Rotation, rotate
from tests.support.kernels import DTYPES, with_gradients
from tests.support.parity import OPERATOR_RTOL, assert_close, assert_no_worse
from tests.support.ptx.build import WHY_NOT
from tests.support.ptx.device import Device
from tests.support.ptx.memory import Fault
from tests.support.selection import cases

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
EPS = 1e-5
NARROW = (torch.bfloat16, torch.float16)


@functools.cache
def device(name: str) -> Device:
    return Device(name)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def unset(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_near(made: Tensor, plain: Tensor, exact: Tensor, *, what: str) -> None:
    """Assert that a result is no worse than the plain form, with room for PTX's approximate powers and quotients."""
    assert_no_worse(made, plain, exact, what=what, approximate=True)


# Rows with one pack per lane, rows over several warps, and rows that are read again.
NORMS = [(dtype, columns) for dtype in NARROW for columns in (16, 1032, 44, 9)]
NORMS += [(torch.float32, 96), (torch.float32, 516), (torch.float32, 301), (torch.float64, 70)]


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(
    ("dtype", "columns"), cases(NORMS, core=[(torch.bfloat16, 1032), (torch.float32, 301)]), ids=str
)
def test_norms(dtype: torch.dtype, columns: int, centred: bool) -> None:
    rows, blocks = (7, 2) if columns < 512 else (3, 2)
    x, residual, grad, sum_grad = (random(rows, columns, dtype=dtype, seed=seed) for seed in range(4))
    weight, bias = random(columns, dtype=dtype), random(columns, dtype=dtype, seed=1) if centred else None
    total, output = unset(rows, columns, dtype=dtype), unset(rows, columns, dtype=dtype)
    mean, inverse = (unset(rows, dtype=wide(dtype)) for _ in range(2))
    outputs = (total, output, mean if centred else None, inverse)
    run = device("norms").call
    assert (
        run("megalite_norm_forward_cuda", x, residual, weight, bias, *outputs, rows, columns, EPS, dtype) == 0
    )
    assert torch.equal(total, x + residual)
    x_grad, weight_grad, bias_grad = (unset(*each.shape, dtype=dtype) for each in (x, weight, weight))
    shift_grad = bias_grad if centred else None
    partials = unset(blocks, 1 + centred, columns, dtype=wide(dtype))
    inputs = (grad, sum_grad, total, weight, mean if centred else None, inverse)
    sizes = (blocks, rows, columns, dtype)
    assert run("megalite_norm_backward_cuda", *inputs, x_grad, weight_grad, shift_grad, partials, *sizes) == 0

    def plain(x: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor]:
        if bias:
            return x * 1, F.layer_norm(x, (columns,), weight, bias[0], EPS)
        return x * 1, rms_norm(x, weight, EPS)

    given = [total, weight, *([bias] if centred else [])]
    _, expected, *gradients = with_gradients(plain, given, [sum_grad, grad])
    _, exact, *exact_gradients = with_gradients(
        plain, [each.double() for each in given], [sum_grad.double(), grad.double()]
    )
    made = [output, x_grad, weight_grad, *([bias_grad] if centred else [])]
    for name, *each in zip(
        ("output", "x", "weight", "bias"),
        made,
        [expected, *gradients],
        [exact, *exact_gradients],
        strict=False,
    ):
        assert_no_worse(*each, what=name)


GATED = {
    "swiglu": (swiglu, 0),
    "geglu": (geglu, 1),
    "tanh": (functools.partial(geglu, approximate="tanh"), 2),
}


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("dtype", cases(DTYPES, core=[torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("features", [24, 13])
def test_gated_activations(dtype: torch.dtype, features: int, name: str) -> None:
    rows = 5
    activation, number = GATED[name]
    gate_up, grad = random(rows, 2 * features, dtype=dtype) * 3, random(rows, features, dtype=dtype)
    out, gate_up_grad = unset(rows, features, dtype=dtype), unset(rows, 2 * features, dtype=dtype)
    run, sizes = device("activations").call, (rows, features, ctypes.c_int(number), dtype)
    assert run("megalite_glu_cuda", gate_up, out, *sizes) == 0
    assert run("megalite_glu_backward_cuda", grad, gate_up, gate_up_grad, *sizes) == 0
    plain = with_gradients(activation, [gate_up], [grad])
    exact = with_gradients(activation, [gate_up.double()], [grad.double()])
    for which, made in enumerate((out, gate_up_grad)):
        assert_near(made, plain[which], exact[which], what=f"result {which}")


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", cases(DTYPES, core=[torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("features", [40, 13])
def test_bias_gelu(dtype: torch.dtype, features: int, approximate: str) -> None:
    rows, blocks = 19, 2  # blocks of 16 rows
    inputs, bias, grad = (
        random(*shape, dtype=dtype) for shape in ((rows, features), (features,), (rows, features))
    )
    out, inputs_grad = unset(rows, features, dtype=dtype), unset(rows, features, dtype=dtype)
    bias_grad, partials = unset(features, dtype=dtype), unset(blocks, features, dtype=wide(dtype))
    run = device("activations").call
    sizes = (rows, features, ctypes.c_int(1 if approximate == "none" else 2), dtype)
    assert run("megalite_bias_gelu_cuda", inputs, bias, out, *sizes) == 0
    gradients = (inputs_grad, bias_grad, partials)
    assert run("megalite_bias_gelu_backward_cuda", grad, inputs, bias, *gradients, *sizes) == 0
    activation = functools.partial(bias_gelu, approximate=approximate)
    plain = with_gradients(activation, [inputs, bias], [grad])
    exact = with_gradients(activation, [inputs.double(), bias.double()], [grad.double()])
    for which, made in enumerate((out, inputs_grad, bias_grad)):
        assert_near(made, plain[which], exact[which], what=f"result {which}")


@pytest.mark.parametrize("uniform", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", cases(DTYPES, core=[torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("columns", cases([1, 17, 1031], core=[17]))
def test_cross_entropy(dtype: torch.dtype, columns: int, uniform: float) -> None:
    rows = 5
    logits = random(rows, columns, dtype=dtype) * 3
    labels = torch.randint(columns + 4, (rows,), generator=torch.Generator().manual_seed(columns)) + 8
    targets = Targets(labels, 10, 1 - uniform, uniform)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], dtype=wide(dtype))
    statistics = unset(3, rows, dtype=wide(dtype))
    run = device("cross_entropy").call
    sizes = (rows, columns, targets.first_id, targets.on_label, targets.uniform, dtype)
    given = logits.clone()
    assert run("megalite_cross_entropy_statistics_cuda", given, labels, weights, statistics, *sizes) == 0
    assert torch.equal(given, logits)
    factors = weights / statistics[1]
    arguments = (labels, statistics[0].contiguous(), factors, weights)
    assert run("megalite_cross_entropy_gradient_cuda", given, *arguments, *sizes) == 0

    def in_torch(logits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        found = shard_statistics(logits, weights, targets)
        write_gradient(logits, found[0], weights / found[1], weights, targets)
        return found, logits

    plain, plain_gradient = in_torch(logits.to(wide(dtype), copy=True), weights)
    exact, exact_gradient = in_torch(logits.to(torch.float64, copy=True), weights.double())
    counted = weights != 0
    assert torch.equal(statistics[0][counted], plain[0][counted])
    for row, what in ((1, "sums"), (2, "expected logits")):
        assert_near(statistics[row][counted], plain[row][counted], exact[row][counted], what=what)
    assert_near(given, plain_gradient.to(dtype), exact_gradient, what="gradient")


class Heads(ctypes.Structure):
    _fields_ = (
        ("from_", ctypes.c_void_p), ("to", ctypes.c_void_p), ("from_strides", ctypes.c_int64 * 3),
        ("to_strides", ctypes.c_int64 * 3), ("heads", ctypes.c_int64), ("turns", ctypes.c_int),
    )  # fmt: skip


class Angles(ctypes.Structure):
    _fields_ = (
        ("cosines", ctypes.c_void_p), ("sines", ctypes.c_void_p), ("positions", ctypes.c_void_p),
        ("rows", ctypes.c_int64), ("batch_stride", ctypes.c_int64), ("interleaved", ctypes.c_int),
        ("inverse", ctypes.c_int),
    )  # fmt: skip


def rotary(
    given: Tensor, made: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor, interleaved: bool
) -> int:
    """Rotate the heads of one tensor [batch, sequence, heads, head_dim]; copy the last head."""
    heads = given.shape[2]
    parts = (Heads * 2)()
    for which, (begin, count) in enumerate(((0, heads - 1), (heads - 1, 1))):
        of, to = given[:, :, begin:], made[:, :, begin:]
        strides = [(ctypes.c_int64 * 3)(*each.stride()[:3]) for each in (of, to)]
        parts[which] = Heads(of.data_ptr(), to.data_ptr(), *strides, count, int(which == 0))
    pointers = (each.data_ptr() for each in (*tables, positions))
    angles = Angles(*pointers, len(tables[0]), positions.stride(0), int(interleaved), 0)
    sizes = (*given.shape[:2], given.shape[3], given.dtype)
    return device("rotary").call(
        "megalite_rotary_cuda", parts, ctypes.c_int(2), ctypes.byref(angles), *sizes,
        touched=[given, made, *tables, positions],
    )  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", cases(DTYPES, core=[torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("head_dim", [32, 10])
def test_rotary(dtype: torch.dtype, head_dim: int, interleaved: bool) -> None:
    given = random(2, 5, 3, head_dim, dtype=dtype)
    angles = random(9, head_dim // 2)
    tables = angles.cos(), angles.sin()
    positions = torch.tensor([[0, 1, 2, 3, 4], [8, 0, 3, 3, 1]])
    made = torch.full_like(given, torch.nan)
    assert rotary(given, made, tuple(each.to(dtype) for each in tables), positions, interleaved) == 0
    assert torch.equal(made[:, :, 2], given[:, :, 2])

    def in_torch(dtype: torch.dtype) -> Tensor:
        chosen = (each.to(given.dtype).to(dtype)[positions].unsqueeze(2) for each in tables)
        heads = given.to(dtype)
        return rotate(heads[:, :, :1], heads[:, :, 1:2], Rotation(*chosen, interleaved=interleaved))

    plain, exact = in_torch(dtype), in_torch(torch.float64)
    for head in range(2):
        assert_no_worse(made[:, :, head : head + 1], plain[head], exact[head], what=f"head {head}")


class Places(ctypes.Structure):
    """The struct of csrc/expert_rows.h."""

    _fields_ = [
        ("places", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tokens", "chosen", "rows", "columns")),
    ]


@pytest.mark.parametrize("dtype", cases(DTYPES, core=[torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("columns", [48, 13])
def test_rows_of_experts(dtype: torch.dtype, columns: int) -> None:
    tokens, chosen = 5, 3
    order = RowOrder.of(torch.tensor([[2, 0, 4], [4, 2, 1], [0, 4, 2], [4, 0, 1], [2, 4, 0]]))
    values, grad, weights = (
        random(tokens, count, dtype=dtype, seed=count) for count in (columns, columns + 1, chosen)
    )
    grad, rows = grad[:, 1:].contiguous(), unset(tokens * chosen, columns, dtype=dtype)
    run, numbers = (
        device("expert_rows").call,
        Places(order.rows.data_ptr(), tokens, chosen, len(rows), columns),
    )
    last = (ctypes.byref(numbers), dtype)
    assert run("megalite_expert_rows_cuda", values, rows, *last, touched=[order.rows]) == 0
    assert torch.equal(rows, values[order.tokens])
    rows, sums = random(*rows.shape, dtype=dtype, seed=1), torch.full_like(values, torch.nan)
    assert run("megalite_expert_sums_cuda", rows, weights, sums, *last, touched=[order.rows]) == 0
    made = torch.full_like(rows, torch.nan), torch.full_like(weights, torch.nan)
    inputs = (grad, rows, weights, *made, *last)
    assert run("megalite_expert_sums_backward_cuda", *inputs, touched=[order.rows]) == 0

    def plain(rows: Tensor, weights: Tensor) -> Tensor:
        return tokens_of_rows(rows, weights, order)

    ours = with_gradients(plain, [rows, weights], [grad])
    exact = with_gradients(plain, [rows.double(), weights.double()], [grad.double()])
    for which, result in enumerate((sums, *made)):
        assert_no_worse(result, ours[which], exact[which], what=f"result {which}")


def test_a_place_that_is_no_row_stops_the_kernel() -> None:
    values, rows, places = random(1, 8), torch.zeros(2, 8).double(), torch.tensor([[0, 2]])
    numbers = Places(places.data_ptr(), 1, 2, 2, 8)
    with pytest.raises(Fault, match="trap"):
        device("expert_rows").call(
            "megalite_expert_rows_cuda", values, rows, ctypes.byref(numbers), values.dtype, touched=[places]
        )


def addresses(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))


TYPES = [(torch.float32, torch.float32, None), (torch.float32, torch.bfloat16, torch.bfloat16)]
TYPES += [(torch.float32, torch.float16, torch.float16), (torch.float64, torch.float64, None)]


@pytest.mark.parametrize(
    ("weight_type", "gradient_type", "copy_type"), cases(TYPES, core=TYPES[1:2]), ids=str
)
def test_adamw(weight_type: torch.dtype, gradient_type: torch.dtype, copy_type: torch.dtype | None) -> None:
    """Test a list of tensors of odd sizes, one of them not aligned to 16 bytes."""
    sizes = [1, 1030, 37, 8]

    def tensors(seed: int, dtype: torch.dtype) -> list[Tensor]:
        drawn = [random(size + 1, dtype=dtype, seed=seed) for size in sizes]
        return [each[1:] if which == 2 else each[:-1] for which, each in enumerate(drawn)]

    weights, means = tensors(0, weight_type), tensors(1, weight_type)
    squares = [each.abs() for each in tensors(2, weight_type)]
    gradients = tensors(3, gradient_type)
    copies = (
        [] if copy_type is None else [torch.full_like(each, torch.nan, dtype=copy_type) for each in weights]
    )
    rules = {"learning_rate": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3.0}

    def expected(dtype: torch.dtype) -> list[list[Tensor]]:
        lists = [[each.to(dtype).clone() for each in some] for some in (weights, gradients, means, squares)]
        adamw_(AdamWTensors(lists[0], [], lists[1], *lists[2:]), AdamWRule(**rules, gradient_scale=0.5))
        return [lists[0], *lists[2:]]

    plain, exact = expected(weight_type), expected(torch.float64)
    lists = [addresses(some) if some else None for some in (weights, copies, gradients, means, squares)]
    numbers = [1e-2, 0.9, 0.95, 1e-8, 0.1, 3.0, 0.5]
    types = [weight_type, gradient_type, copy_type or weight_type]
    run = device("adamw").call
    counted = (ctypes.c_int64 * len(sizes))(*sizes)
    touched = [*weights, *copies, *gradients, *means, *squares]
    assert (
        run("megalite_adamw_update_cuda", *lists, counted, len(sizes), *numbers, *types, touched=touched) == 0
    )
    for name, made, one, two in zip(
        ("weight", "mean", "square"), (weights, means, squares), plain, exact, strict=True
    ):
        for each in zip(made, one, two, strict=True):
            assert_no_worse(*each, what=name)
    assert all(torch.equal(each, weight.to(copy_type)) for each, weight in zip(copies, weights, strict=False))

    partials, total = unset(len(sizes), dtype=torch.float64), unset(1, dtype=torch.float64)
    arguments = (addresses(gradients), counted, len(sizes), partials, total, gradient_type)
    assert run("megalite_adamw_sum_of_squares_cuda", *arguments, touched=gradients) == 0
    sums = sum(each.double().square().sum() for each in gradients)
    assert_close(total[0], sums, rtol=OPERATOR_RTOL)

    for own, gradient in zip(weights, gradients, strict=True):
        wanted = own.clone()
        accumulate_(wanted, gradient)
        assert run("megalite_adamw_accumulate_cuda", own, gradient, len(own), weight_type, gradient_type) == 0
        assert torch.equal(own, wanted)
