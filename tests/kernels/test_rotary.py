"""The compiled rotary embedding and its gradients: no worse than plain torch, in every type, layout and shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.ops.rotary import (
    Rotation,
    compiled_rotate,
    compiled_split_and_rotate,
    rotary_frequencies,
    rotary_table,
    rotate,
    split_and_rotate,
)
from tests.support.kernels import DTYPES, OUTGROWING, needs_library, with_gradients
from tests.support.parity import OPERATOR_RTOL, assert_close, assert_no_worse

pytestmark = needs_library
HEADS, KEY_VALUE_HEADS = 4, 2
GENERATOR = torch.Generator().manual_seed(12)
interleaved_or_not = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def _angles(rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return tables [rows, head_dim / 2] of cosines and sines, float64."""
    return rotary_table(rows, rotary_frequencies(head_dim, 100.0), torch.float64)


def _parts(
    batch: int, sequence: int, head_dim: int, heads: int = HEADS, shared: int = KEY_VALUE_HEADS
) -> list[Tensor]:
    """Return a packed projection, and gradients of query, key and value, in float64."""
    return [
        torch.randn(batch, sequence, each, head_dim, dtype=torch.float64, generator=GENERATOR)
        for each in (heads + 2 * shared, heads, shared, shared)
    ]


def _of_tokens(table: Tensor) -> Tensor:
    return table[None, :, None]


@interleaved_or_not
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 10])
def test_query_key_value_and_gradient(dtype: torch.dtype, interleaved: bool, head_dim: int) -> None:
    qkv, *grads = (each.to(dtype) for each in _parts(2, 40, head_dim))
    tables = [_of_tokens(each.to(dtype)) for each in _angles(40, head_dim)]

    def run(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        def turn(qkv: Tensor) -> tuple[Tensor, ...]:
            angles = (each.to(dtype) for each in tables)
            form = compiled_split_and_rotate if fused else split_and_rotate
            return form(qkv, HEADS, KEY_VALUE_HEADS, Rotation(*angles, interleaved=interleaved))

        return with_gradients(turn, [qkv.to(dtype)], [each.to(dtype) for each in grads])

    results = zip(run(dtype, True), run(dtype, False), run(torch.float64, False), strict=True)
    for name, each in zip(("query", "key", "value", "qkv_grad"), results, strict=True):
        assert_no_worse(*each, what=name)


@settings(max_examples=60, derandomize=True)
@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.integers(1, 35),
    st.sampled_from(DTYPES), st.booleans(), st.booleans(),
)  # fmt: skip
def test_ragged_shapes(
    batch: int,
    sequence: int,
    heads: int,
    shared: int,
    pairs: int,
    dtype: torch.dtype,
    interleaved: bool,
    own: bool,
) -> None:
    """Test position_ids. own: every row of the batch has its own positions, in any order."""
    qkv = _parts(batch, sequence, 2 * pairs, heads, shared)[0].to(dtype)
    tables = [each.to(dtype) for each in _angles(50, 2 * pairs)]
    position_ids = torch.randint(50, (batch if own else 1, sequence), generator=GENERATOR)
    form = {"position_ids": position_ids, "interleaved": interleaved}
    query, key, value = compiled_split_and_rotate(qkv, heads, shared, Rotation(*tables, **form))
    plain = split_and_rotate(qkv, heads, shared, Rotation(*tables, **form))
    exact = split_and_rotate(
        qkv.double(), heads, shared, Rotation(*(each.double() for each in tables), **form)
    )
    for one, two, three in zip((query, key), plain[:2], exact[:2], strict=True):
        assert_no_worse(one, two, three, what="turned")
    assert torch.equal(value, qkv[:, :, heads + shared :])
    gathered = [each[position_ids].unsqueeze(2) for each in tables]
    again = compiled_split_and_rotate(qkv, heads, shared, Rotation(*gathered, interleaved=interleaved))
    assert all(torch.equal(one, two) for one, two in zip((query, key, value), again, strict=True))


@interleaved_or_not
def test_heads_apart_and_with_gaps(interleaved: bool) -> None:
    """Test transposed views of one tensor as query and key, and expanded or transposed gradients."""
    cosines, sines = (_of_tokens(each) for each in _angles(7, 12))
    packed = torch.randn(2, HEADS + KEY_VALUE_HEADS, 7, 12, dtype=torch.float64, generator=GENERATOR)
    grads = [
        torch.randn(2, HEADS, 7, 12, dtype=torch.float64, generator=GENERATOR).transpose(1, 2),
        torch.ones((), dtype=torch.float64).expand(2, 7, KEY_VALUE_HEADS, 12),
    ]

    def run(fused: bool) -> list[Tensor]:
        def turn(packed: Tensor) -> tuple[Tensor, Tensor]:
            query, key = packed.transpose(1, 2).split((HEADS, KEY_VALUE_HEADS), dim=2)
            return (compiled_rotate if fused else rotate)(
                query, key, Rotation(cosines, sines, interleaved=interleaved)
            )

        return with_gradients(turn, [packed], grads)

    for fused, plain in zip(run(True), run(False), strict=True):
        assert_close(fused, plain, rtol=OPERATOR_RTOL)


@interleaved_or_not
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_is_the_same_to_the_bit(dtype: torch.dtype, interleaved: bool) -> None:
    qkv = _parts(2, 5, 24)[0].to(dtype)
    angles = [_of_tokens(each.to(dtype)) for each in _angles(5, 24)]
    form = {"interleaved": interleaved}
    expected = compiled_split_and_rotate(qkv, HEADS, KEY_VALUE_HEADS, Rotation(*angles, **form))
    with torch.no_grad():
        given = qkv.clone()
        made = compiled_split_and_rotate(
            given, HEADS, KEY_VALUE_HEADS, Rotation(*angles, **form), overwrite=True
        )
    assert all(torch.equal(one, two) for one, two in zip(made, expected, strict=True))
    assert made[0].data_ptr() == given.data_ptr()
    recorded = qkv.clone().requires_grad_()
    split_and_rotate(recorded, HEADS, KEY_VALUE_HEADS, Rotation(*angles, **form), overwrite=True)
    assert torch.equal(recorded, qkv), "overwritten though a gradient is recorded"


@interleaved_or_not
@pytest.mark.parametrize("head_dim", [10, 64])
def test_tokens_beyond_the_caches_are_the_same_to_the_bit(head_dim: int, interleaved: bool) -> None:
    """Large outputs are streamed and small ones are not; heads of 10 start and end inside cache lines."""
    tokens = OUTGROWING // (8 * head_dim)
    qkv, *grads = (each.float() for each in _parts(1, tokens, head_dim))
    tables = [_of_tokens(each.float()) for each in _angles(tokens, head_dim)]

    def turned(at: slice) -> list[Tensor]:
        def turn(qkv: Tensor) -> tuple[Tensor, ...]:
            angles = (each[:, at] for each in tables)
            return compiled_split_and_rotate(
                qkv, HEADS, KEY_VALUE_HEADS, Rotation(*angles, interleaved=interleaved)
            )

        return with_gradients(turn, [qkv[:, at]], [each[:, at] for each in grads])

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = turned(slice(None))
    finally:
        torch.set_num_threads(threads)
    last = slice(tokens - 100, None)
    assert all(torch.equal(one[:, last], two) for one, two in zip(whole, turned(last), strict=True))


@interleaved_or_not
def test_gradients_are_those_of_the_outputs(interleaved: bool) -> None:
    qkv = _parts(2, 3, 6)[0].requires_grad_()
    query, key = (torch.randn(2, 3, each, 6, dtype=torch.float64, generator=GENERATOR) for each in (2, 1))
    cosines, sines = _angles(9, 6)
    form = {"position_ids": torch.tensor([[8, 0, 3]]), "interleaved": interleaved}
    assert torch.autograd.gradcheck(
        lambda qkv: compiled_split_and_rotate(qkv, HEADS, KEY_VALUE_HEADS, Rotation(cosines, sines, **form)),
        [qkv],
    )
    assert torch.autograd.gradcheck(
        lambda *heads: compiled_rotate(*heads, Rotation(cosines, sines, **form)),
        [query.requires_grad_(), key.requires_grad_()],
    )


def test_operators_keep_torchs_rules() -> None:
    qkv, *grads = _parts(2, 3, 8)
    tables, operators = _angles(3, 8), torch.ops.megalite
    for positions in (None, torch.tensor([[2, 0, 1]])):
        angles = (*tables, positions, False)
        packed = (qkv.clone().requires_grad_(), HEADS, KEY_VALUE_HEADS, *angles)
        torch.library.opcheck(operators.rotary_split.default, packed)
        torch.library.opcheck(operators.rotary_split_backward.default, (*grads, *angles))
        torch.library.opcheck(operators.rotary_.default, (qkv, *angles))
        query, key = (each.clone().requires_grad_() for each in grads[:2])
        torch.library.opcheck(operators.rotary.default, (query, key, *angles, False))


def test_tensors_without_data() -> None:
    qkv = torch.empty(2, 3, HEADS + 2 * KEY_VALUE_HEADS, 8, device="meta")
    angles = [torch.empty(1, 3, 1, 4, device="meta")] * 2
    query, key, value = compiled_split_and_rotate(qkv, HEADS, KEY_VALUE_HEADS, Rotation(*angles))
    assert query.shape == (2, 3, HEADS, 8) and key.shape == value.shape == (2, 3, KEY_VALUE_HEADS, 8)
    assert [each.shape for each in compiled_rotate(query, key, Rotation(*angles))] == [query.shape, key.shape]
    assert query.is_meta


@interleaved_or_not
def test_compiled_without_a_break(interleaved: bool) -> None:
    qkv, *grads = _parts(2, 3, 8)
    angles = [_of_tokens(each) for each in _angles(3, 8)]

    def run(fused: bool, qkv: Tensor) -> tuple[Tensor, ...]:
        form = {"interleaved": interleaved}
        split, turn = (compiled_split_and_rotate, compiled_rotate) if fused else (split_and_rotate, rotate)
        query, key, value = split(qkv, HEADS, KEY_VALUE_HEADS, Rotation(*angles, **form))
        return *turn(query, key, Rotation(*angles, **form)), value

    expected = with_gradients(lambda qkv: run(True, qkv), [qkv], grads)
    for fused in (True, False):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        made = with_gradients(lambda qkv: compiled(fused, qkv), [qkv], grads)  # noqa: B023
        for one, two in zip(made, expected, strict=True):
            assert_close(one, two, rtol=OPERATOR_RTOL)


def test_no_tokens() -> None:
    qkv, *grads = _parts(2, 0, 8)
    angles = [_of_tokens(each) for each in _angles(0, 8)]
    made = with_gradients(
        lambda qkv: compiled_split_and_rotate(qkv, HEADS, KEY_VALUE_HEADS, Rotation(*angles)), [qkv], grads
    )
    assert [each.shape[1] for each in made] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads": 5}, r"qkv has 8 heads, not 5 \+ 2 x 2"),
        ({"cosines": torch.ones(3, 5)}, "sines has 12 elements, not 15"),
        (
            {"cosines": torch.ones(3, 5), "sines": torch.ones(3, 5)},
            "cosines have 5 columns, not head_dim / 2 = 4",
        ),
        ({"cosines": torch.ones(4, 4), "sines": torch.ones(4, 4)}, "4 rows of angles for 2 x 3 tokens"),
        ({"sines": torch.ones(3, 4, dtype=torch.float64)}, "sines has another dtype"),
        ({"positions": torch.tensor([0, 3, 1])}, "position 3 is outside of the 3 rows of cosines"),
        ({"positions": torch.tensor([0, -1, 1])}, "position -1 is outside of the 3 rows of cosines"),
        ({"positions": torch.ones(3)}, "positions must be int64"),
        ({"qkv": torch.ones(2, 3, 8, 7)}, "head_dim must be even and positive, not 7"),
        ({"qkv": torch.ones(6, 8, 8)}, "qkv has 3 dims, not 4"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, said: str) -> None:
    fitting = {"qkv": torch.ones(2, 3, 8, 8), "heads": HEADS, "key_value_heads": KEY_VALUE_HEADS}
    fitting |= {
        "cosines": torch.ones(3, 4),
        "sines": torch.ones(3, 4),
        "positions": None,
        "interleaved": False,
    }
    with pytest.raises(RuntimeError, match=said):
        torch.ops.megalite.rotary_split(*(fitting | change).values())
