"""Attention of a decode step by the compiled operator: no worse than torch's, equal whatever rows stand beside."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megalite.ops.attention_form import AttentionForm
from megalite.ops.decode_attention import compiled_decode_attention, compiled_serves, decode_attention
from tests.support.kernels import DTYPES, needs_library
from tests.support.parity import assert_no_worse

pytestmark = needs_library
GENERATOR = torch.Generator().manual_seed(11)
ROOM, SLOTS = 60, 7


class Case(NamedTuple):
    """Heads and how they attend."""

    heads: int
    kv_heads: int
    head_dim: int
    form: dict[str, Any]


# Groups of 1, 2, 4, 5 and 8 queries; head sizes of whole vectors, and of rests; every form.
CASES = [
    Case(6, 6, 64, {}),
    Case(8, 4, 40, {"prefix": 3, "window": 7}),
    Case(8, 1, 128, {"window": 5, "softcap": 20.0}),
    Case(12, 3, 6, {"prefix": 2, "softcap": 30.0, "scale": 0.4}),
    Case(5, 1, 256, {"window": 1}),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def _made(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return query, key, value, the cache and the lengths of five rows, the last of which fills its slot."""
    packed = _random(5, case.heads + 2 * case.kv_heads, case.head_dim).to(dtype)
    query, key, value = packed.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    cache = _random(2, SLOTS, case.kv_heads, ROOM, case.head_dim).to(dtype)
    return query, key, value, cache, torch.tensor([0, 3, 17, 40, ROOM - 1 - case.form.get("prefix", 0)])


def _by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    lengths: Tensor,
    *,
    prefix: int = 0,
    window: int | None = None,
    **form: Any,
) -> Tensor:
    """The same by the plain form, over all places of the slots with a mask."""
    rows, own = torch.arange(len(lengths)), (lengths + prefix).unsqueeze(1)
    cache[0, rows, :, own[:, 0]], cache[1, rows, :, own[:, 0]] = key, value
    place = torch.arange(ROOM)
    hidden = place > own
    if window is not None:
        hidden |= (place <= own - window) & (place >= prefix)
    bias = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, float("-inf"))[:, None, None]
    keys, values = cache[:, : len(rows)]
    return decode_attention(query, keys, values, bias, AttentionForm(**form))


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_no_worse_than_torch_s(case: Case, dtype: torch.dtype) -> None:
    query, key, value, cache, lengths = _made(case, dtype)
    exact = [each.double() for each in (query, key, value, cache)]
    plain_cache = cache.clone()
    found = compiled_decode_attention(query, key, value, cache, lengths, AttentionForm(**case.form))
    plain = _by_torch(query, key, value, plain_cache, lengths, **case.form)
    assert torch.equal(cache, plain_cache)
    assert_no_worse(found, plain, _by_torch(*exact, lengths, **case.form), what="attention")


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_on_any_number_of_threads(case: Case, dtype: torch.dtype) -> None:
    query, key, value, cache, lengths = _made(case, dtype)
    together = compiled_decode_attention(
        query, key, value, cache.clone(), lengths, AttentionForm(**case.form)
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for row in range(len(lengths)):
            own = slice(row, row + 1)
            alone = compiled_decode_attention(
                query[own],
                key[own],
                value[own],
                cache[:, own].contiguous(),
                lengths[own],
                AttentionForm(**case.form),
            )
            assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(threads)


def test_values_that_are_no_numbers_stay_in_their_row() -> None:
    query, key, value, cache, lengths = _made(CASES[0], torch.float32)
    key[1, 2, 0] = torch.nan
    found = compiled_decode_attention(query, key, value, cache, lengths)
    assert found[1, 2].isnan().all()
    found[1, 2] = 0
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.ones(5, 6, 32)}, "query must be"),
        ({"key": torch.ones(5, 3, 64)}, "key must be"),
        ({"value": torch.ones(5, 6, 64).double()}, "value has another dtype"),
        ({"query": torch.ones(5, 64, 6).transpose(1, 2)}, "last dim of query"),
        ({"cache": torch.ones(2, 3, 6, ROOM, 64)}, "5 rows, but the cache has 3 slots"),
        ({"cache": torch.ones(2, 7, 4, ROOM, 64)}, "6 heads are no multiple of the 4 heads"),
        ({"lengths": torch.tensor([0, 0, 0, 0, ROOM])}, "slot 4 holds 60 tokens .* room for 60"),
        ({"lengths": torch.tensor([-1, 0, 0, 0, 0])}, "slot 0 holds -1 tokens"),
        ({"lengths": torch.zeros(5)}, "must be int64"),
        ({"form": AttentionForm(window=0)}, "window must be positive"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_wrong_tensors_are_refused(changed: dict[str, Any], message: str) -> None:
    names = ("query", "key", "value", "cache", "lengths")
    given = dict(zip(names, _made(CASES[0], torch.float32), strict=True)) | changed
    with pytest.raises(RuntimeError, match=message):
        compiled_decode_attention(**given)


def test_it_serves_cpus_outside_autograd() -> None:
    cache = torch.zeros(2, 1, 1, 8, 4)
    assert not compiled_serves(cache)
    with torch.inference_mode():
        assert compiled_serves(cache)
        assert not compiled_serves(cache.to("meta"))
