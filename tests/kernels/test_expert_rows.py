"""The compiled rows of experts and their sums: no worse than plain torch, in every type, shape and order of choices."""

import ctypes
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.ops.expert_rows import RowOrder, rows_of_tokens, tokens_of_rows
from tests.support.emulated_cuda import emulated, in_order
from tests.support.kernels import DTYPES, OUTGROWING, needs_library, with_gradients
from tests.support.parity import assert_no_worse, assert_rounded_alike

pytestmark = needs_library
GENERATOR = torch.Generator().manual_seed(31)
EXPERTS = 7


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def _anywhere(tokens: int, chosen: int) -> Tensor:
    return _random(tokens, EXPERTS).argsort(dim=1)[:, :chosen]


def _without_the_middle(tokens: int, chosen: int) -> Tensor:
    choices = _anywhere(tokens, chosen)
    return torch.where(choices == EXPERTS // 2, EXPERTS, choices)


def _all_to_one(tokens: int, chosen: int) -> Tensor:
    return torch.full((tokens, chosen), 2)


CHOICES = {"anywhere": _anywhere, "an expert without rows": _without_the_middle, "all to one": _all_to_one}
# (tokens, chosen, columns): whole blocks of columns and rests of them, no token, one choice.
SHAPES = [(33, 4, 96), (40, 2, 7), (9, 1, 130), (0, 3, 16), (300, 7, 64), (5, 2, 1)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def _through(rows_or_sums: str, order: RowOrder) -> Callable[..., Tensor]:
    if rows_or_sums == "rows":
        return lambda tokens: rows_of_tokens(tokens, order)
    return lambda rows, weights: tokens_of_rows(rows, weights, order)


def _in_words(rows_or_sums: str, experts: Tensor) -> Callable[..., Tensor]:
    """Return the formula without an order's tensors: row after row, expert after expert, token after token."""
    places = sorted((expert, i) for i, expert in enumerate(experts.flatten().tolist()))
    tokens = torch.tensor([i // experts.shape[1] for _, i in places], dtype=torch.int64)
    choices = torch.tensor([i for _, i in places], dtype=torch.int64)
    if rows_or_sums == "rows":
        return lambda values: values[tokens]

    def sums(rows: Tensor, weights: Tensor) -> Tensor:
        weighted = rows * weights.flatten()[choices].unsqueeze(1)
        return rows.new_zeros(len(experts), rows.shape[1]).index_add(0, tokens, weighted)

    return sums


@shapes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choices", CHOICES)
def test_rows_sums_and_gradients(shape: tuple[int, int, int], dtype: torch.dtype, choices: str) -> None:
    tokens, chosen, columns = shape
    experts = CHOICES[choices](tokens, chosen)
    inputs = {
        "rows": [_random(tokens, columns)],
        "sums": [_random(tokens * chosen, columns), _random(tokens, chosen)],
    }
    for name, given in inputs.items():
        given = [tensor.to(dtype) for tensor in given]
        grad = _random(tokens * (chosen if name == "rows" else 1), columns).to(dtype)
        made, plain = (
            with_gradients(_through(name, RowOrder.of(experts, compiled)), given, [grad])
            for compiled in (True, False)
        )
        exact = with_gradients(
            _in_words(name, experts), [tensor.double() for tensor in given], [grad.double()]
        )
        for number, results in enumerate(zip(made, plain, exact, strict=True)):
            if tokens:
                assert_no_worse(*results, what=f"{name}, {number}")
            assert results[0].shape == results[2].shape


def test_gradients_are_those_of_the_outputs() -> None:
    order = RowOrder.of(_anywhere(6, 3), compiled=True)
    tokens, rows, weights = (_random(*size).requires_grad_() for size in ((6, 5), (18, 5), (6, 3)))
    assert torch.autograd.gradcheck(_through("rows", order), [tokens])
    assert torch.autograd.gradcheck(_through("sums", order), [rows, weights])
    assert torch.autograd.gradcheck(
        lambda rows: torch.ops.megalite.expert_sums(rows, None, order.rows), [rows]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(160, 3, 200), (OUTGROWING // 1024, 7, 256)], ids=["in caches", "streamed"]
)
def test_any_number_of_threads_and_any_tokens_beside_give_the_same_bits(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    tokens, chosen, columns = shape
    experts = _anywhere(tokens, chosen)
    values, weights, grad = (
        torch.randn(*size, generator=GENERATOR).to(dtype)
        for size in ((tokens, columns), (tokens, chosen), (tokens, columns))
    )

    def results(own: slice) -> list[Tensor]:
        order = RowOrder.of(experts[own], compiled=True)
        both = lambda values, weights: tokens_of_rows(rows_of_tokens(values, order), weights, order)  # noqa: E731
        return with_gradients(both, [values[own], weights[own]], [grad[own]])

    whole, threads = results(slice(None)), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results(slice(None))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(whole, alone, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(whole, results(slice(20, 50)), strict=True):
        assert torch.equal(one[20:50], other)


def test_strided_inputs_and_gradients() -> None:
    order = RowOrder.of(_anywhere(12, 2), compiled=True)
    values, weights = _random(10, 12).t(), _random(2, 12).t()
    both = lambda values, weights: tokens_of_rows(rows_of_tokens(values, order), weights, order)  # noqa: E731
    grads = _random(10, 12).t(), torch.ones((), dtype=torch.float64).expand(12, 10)
    for grad in grads:
        strided = with_gradients(both, [values, weights], [grad])
        packed = with_gradients(
            both, [tensor.contiguous() for tensor in (values, weights)], [grad.contiguous()]
        )
        for one, other in zip(strided, packed, strict=True):
            assert torch.equal(one, other)


def test_values_that_are_no_numbers_pass_on_to_their_own_token_alone() -> None:
    order = RowOrder.of(_anywhere(9, 2), compiled=True)
    rows = torch.ones(18, 70)
    rows[order.rows[4, 1], 3], rows[order.rows[7, 0], 69] = torch.nan, torch.inf
    found = tokens_of_rows(rows, torch.ones(9, 2), order)
    assert found[4, 3].isnan() and found[7, 69].isinf() and found.eq(2).sum() == found.numel() - 2


def test_operators_keep_torchs_rules() -> None:
    places, operators = RowOrder.of(_anywhere(4, 2)).rows, torch.ops.megalite
    tokens, rows, weights, grad = _random(4, 6), _random(8, 6), _random(4, 2), _random(4, 6)
    torch.library.opcheck(operators.expert_rows.default, (tokens.requires_grad_(), places))
    torch.library.opcheck(operators.expert_sums_backward.default, (grad, rows, weights, places))
    rows.requires_grad_()
    torch.library.opcheck(operators.expert_sums.default, (rows, weights.requires_grad_(), places))
    torch.library.opcheck(operators.expert_sums.default, (rows, None, places))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda op: op.expert_rows(torch.ones(2, 4), torch.tensor([[0, 1], [2, 4]])), "place 4 is none of 4"),
        (lambda op: op.expert_rows(torch.ones(2, 4), torch.tensor([[0, -1], [2, 3]])), "place -1 is none"),
        (lambda op: op.expert_rows(torch.ones(3, 4), torch.tensor([[0, 1]])), "places must be of 3 tokens"),
        (lambda op: op.expert_rows(torch.ones(1, 4), torch.tensor([[0, 1]]).int()), "places must be int64"),
        (
            lambda op: op.expert_sums(torch.ones(2, 4), torch.ones(2, 2), torch.tensor([[0, 1]])),
            "elements, not",
        ),
        (
            lambda op: op.expert_sums(torch.ones(2, 4), torch.ones(1, 2).double(), torch.tensor([[0, 1]])),
            "dtype",
        ),
        (
            lambda op: op.expert_sums_backward(
                torch.ones(1, 4), torch.ones(3, 4), torch.ones(1, 2), torch.tensor([[0, 1]])
            ),
            "elements, not 3",
        ),
    ],
    ids=["beyond", "negative", "tokens", "int32", "weights", "type", "rows without a place"],
)
def test_wrong_tensors_are_refused(call: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(torch.ops.megalite)


# ------------------------------------------------------------------------------------------------ the kernels for GPUs


class Places(ctypes.Structure):
    """The struct of csrc/expert_rows.h."""

    _fields_ = [
        ("places", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("tokens", "chosen", "rows", "columns")),
    ]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build the emulator with")
    return emulated("expert_rows", tmp_path_factory.mktemp("expert_rows"))


# Packs over several rounds of a block, and rows that are not aligned; one warp and several.
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, (5, 3, 2312)),
        (torch.float32, (6, 2, 96)),
        (torch.float32, (4, 1, 301)),
        (torch.float16, (7, 4, 9)),
        (torch.float64, (5, 2, 70)),
    ],
    ids=str,
)
def test_emulated_kernels_have_the_numbers_of_the_cpu(
    gpu: ctypes.CDLL, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    tokens, chosen, columns = shape
    places = RowOrder.of(_anywhere(tokens, chosen)).rows
    numbers = Places(places.data_ptr(), tokens, chosen, places.numel(), columns)

    def call(name: str, *tensors: Tensor | None) -> None:
        pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
        code = DTYPES.index(dtype)
        function = getattr(gpu, f"megalite_{name}_cuda")
        assert function(*pointers, ctypes.byref(numbers), ctypes.c_int(code), None) == 0

    values, weights, grad = (
        _random(*size).to(dtype) for size in ((tokens, columns), (tokens, chosen), (tokens, columns))
    )
    rows = torch.full((tokens * chosen, columns), torch.nan, dtype=dtype)
    call("expert_rows", values, rows)
    assert torch.equal(rows, torch.ops.megalite.expert_rows(values, places))
    rows = _random(tokens * chosen, columns).to(dtype)
    for factors in (weights, None):
        sums = torch.full_like(values, torch.nan)
        call("expert_sums", rows, factors, sums)
        assert_rounded_alike(sums, torch.ops.megalite.expert_sums(rows, factors, places))
    found = []
    for order in (0, 5):
        in_order(gpu, order)
        made = torch.full_like(rows, torch.nan), torch.full_like(weights, torch.nan)
        call("expert_sums_backward", grad, rows, weights, *made)
        found.append(made)
    expected = torch.ops.megalite.expert_sums_backward(grad, rows, weights, places)
    for one, other, ours in zip(*found, expected, strict=True):
        assert torch.equal(one, other)
        assert_rounded_alike(one, ours)


def test_an_emulated_sum_of_rows_without_columns_is_zero(gpu: ctypes.CDLL) -> None:
    places, empty, grad = torch.tensor([[0, 1]]), torch.empty(0), torch.full((1, 2), torch.nan)
    numbers = Places(places.data_ptr(), 1, 2, 2, 0)
    pointers = [
        ctypes.c_void_p(tensor.data_ptr()) for tensor in (empty, empty, torch.ones(1, 2), empty, grad)
    ]
    assert gpu.megalite_expert_sums_backward_cuda(*pointers, ctypes.byref(numbers), 0, None) == 0
    assert grad.eq(0).all()


def test_a_step_between_the_threads_is_needed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without its barrier the sum over the warps is wrong in some order: the emulator would show it."""
    broken = emulated("expert_rows", tmp_path_factory.mktemp("broken"), without="__syncthreads();", but="")
    places, grad, rows = torch.tensor([[0]]), torch.ones(1, 1024), torch.ones(1, 1024)
    numbers, sums = Places(places.data_ptr(), 1, 1, 1, 1024), set()
    for order in range(4):
        in_order(broken, order)
        made = torch.full_like(rows, torch.nan), torch.full((1, 1), torch.nan)
        tensors = (grad, rows, torch.ones(1, 1), *made)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        broken.megalite_expert_sums_backward_cuda(*pointers, ctypes.byref(numbers), 0, None)
        sums.add(made[1].item())
    assert sums != {1024.0}
