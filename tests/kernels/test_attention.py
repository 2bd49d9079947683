"""The compiled attention operator on the CPU: against float64, its gradients, and torch's operator checks."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.ops import attention as ops
from megalite.ops import packed_attention as packed
from megalite.ops.attention_form import AttentionForm
from megalite.ops.packed_attention import (
    BlockPositions,
    PackedForm,
    packed_attention,
    packed_block,
    why_not_packed,
)
from tests.support.attention import Packed, attention, counted_mask, gradients, starts
from tests.support.kernels import DTYPES, needs_library
from tests.support.parity import BF16_RTOL, FLOAT32_RTOL, LAYOUT_RTOL, assert_close, assert_no_worse

pytestmark = needs_library
# Blocks of longer sequences: where their rows begin decides window, causality and dropout.
BLOCKS = {
    "a block in a window": Packed((130,), (70,), left=100, positions=BlockPositions(1, 90, 10)),
    "a block before its keys": Packed((70,), (130,), positions=BlockPositions(1, 5, 40), mask=counted_mask(1, 2)),
    "a block of documents": Packed(
        (0, 80, 0, 10, 20, 60), (70, 20, 0, 0, 90, 0), left=99, positions=BlockPositions(2, 180, 90),
        mask=counted_mask(2, 2),
    ),
}  # fmt: skip
# Blocks have 64 queries and 64 keys.
CASES = {
    "documents": Packed((70, 1, 0, 130), (70, 1, 0, 130), head_size=20),
    "unmasked": Packed((70, 3), (130, 7), right=-1, heads=3, kv_heads=3),
    "a cache": Packed((10, 65), (200, 66), heads=4, kv_heads=2, head_size=8),
    "rows that see nothing": Packed((130,), (70,)),
    "window": Packed((150,), (200,), left=60),
    "band": Packed((90,), (130,), left=20, right=15),
    "no keys": Packed((5,), (0,)),
    "no tokens": Packed((0,), (0,)),
    "wide heads": Packed((66,), (66,), head_size=128),
    "dropped, documents": Packed((70, 1, 0, 129), (70, 1, 0, 129), head_size=20, mask=counted_mask(2, 2)),
    "dropped, a window": Packed((150,), (200,), left=60, heads=4, kv_heads=2, mask=counted_mask(1, 4)),
    "dropped, rows that see nothing": Packed((130,), (70,), mask=counted_mask(1, 2)),
    "dropped, unmasked": Packed((40, 40), (70, 70), right=-1, mask=counted_mask(2, 2, 60000)),
    "dropped, no keys": Packed((5,), (0,), mask=counted_mask(1, 2)),
    **BLOCKS,
}


def _run(packed: Packed, inputs: list[Tensor], **how: bool) -> tuple[Tensor, Tensor]:
    if packed.positions is not None:
        ends = starts(packed.queries), starts(packed.keys), max(packed.queries), max(packed.keys)
        window = packed.left, packed.right
        form = PackedForm(*ends, window, packed.scale, mask=packed.mask, positions=packed.positions)
        return packed_block(*inputs, form)
    return packed_attention(
        *inputs,
        starts(packed.queries),
        starts(packed.keys),
        max_seqlen_q=max(packed.queries),
        max_seqlen_k=max(packed.keys),
        window_size=(packed.left, packed.right),
        mask=packed.mask,
        **how,
    )


def _compare(packed: Packed, dtype: torch.dtype) -> None:
    inputs = packed.inputs(dtype)
    output, lse = _run(packed, inputs)
    wide = [each.double() for each in inputs]
    exact, exact_lse = attention(packed, *wide)
    nothing = exact_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), nothing)
    rtol = LAYOUT_RTOL if dtype == torch.float64 else FLOAT32_RTOL
    assert_close(lse[~nothing], exact_lse[~nothing], rtol=rtol, what="log-sum-exps")
    grads = packed.output_grads(dtype, lse.detach())
    found = torch.autograd.grad([output, lse], inputs, [grads[0], grads[1]])
    ours, theirs = [output, *found], [exact, *gradients(packed, wide, *grads)]
    plain = [attention(packed, *inputs)[0], *gradients(packed, inputs, *grads)]
    for what, one, naive, reference in zip(
        ("output", "query", "key", "value"), ours, plain, theirs, strict=True
    ):
        if dtype == torch.float64:  # the plain form is the reference itself
            assert_close(one, reference, rtol=rtol, what=what)
        else:
            assert_no_worse(one, naive, reference, what=what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_it_is_attention(case, dtype) -> None:
    _compare(CASES[case], dtype)


@given(st.data())
@settings(max_examples=15)
def test_ragged_sequences(data) -> None:
    lengths = st.lists(st.integers(0, 90), min_size=1, max_size=4)
    queries = tuple(data.draw(lengths))
    keys = tuple(data.draw(st.integers(0, 90)) for _ in queries)
    group, kv_heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    reach = st.sampled_from([-1, 0, 1, 5, 63, 64, 65])
    _compare(
        Packed(
            queries, keys, left=data.draw(reach), right=data.draw(reach), heads=group * kv_heads, kv_heads=kv_heads,
            head_size=data.draw(st.integers(1, 40)),
            mask=data.draw(st.sampled_from([None, counted_mask(1, group * kv_heads)])),
        ),
        torch.float64,
    )  # fmt: skip


@pytest.mark.parametrize("mask", [None, counted_mask(2, 2)], ids=["plain", "dropped"])
def test_gradcheck_of_output_and_log_sum_exps(mask) -> None:
    packed = Packed((2, 0, 4), (3, 1, 4), left=2, right=1, heads=2, kv_heads=1, head_size=2, mask=mask)
    inputs = [each.detach().clone().requires_grad_() for each in packed.inputs(torch.float64)]
    assert torch.autograd.gradcheck(lambda *each: _run(packed, list(each)), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_scores_stay_finite(dtype) -> None:
    packed = Packed((100,), (100,))
    inputs = packed.inputs(dtype)
    huge = [inputs[0] * 1e4, inputs[1] * 1e4, inputs[2]]
    output, lse = _run(packed, huge)
    found = torch.autograd.grad(output.float().sum() + lse.sum(), inputs)
    assert all(torch.isfinite(each).all() for each in (output, lse, *found))
    exact, _ = attention(packed, *(each.double() for each in huge))
    assert_close(output, exact, rtol=BF16_RTOL if dtype == torch.bfloat16 else FLOAT32_RTOL)


def test_documents_know_nothing_of_each_other() -> None:
    """Setting another document to NaN changes no bit of this document."""
    packed = Packed((30, 70, 5), (30, 70, 5), head_size=16)
    inputs = packed.inputs(torch.float32)
    output, lse = _run(packed, inputs)
    with torch.no_grad():
        for each in inputs:
            each[30:100] = float("nan")
    leaked, leaked_lse = _run(packed, inputs)
    for own in (slice(0, 30), slice(100, 105)):
        assert torch.equal(leaked[own], output[own])
        assert torch.equal(leaked_lse[:, own], lse[:, own])
    found = torch.autograd.grad(leaked[:30].sum(), inputs)
    assert all(torch.isfinite(each[:30]).all() for each in found)


def test_the_order_of_documents_does_not_matter() -> None:
    packed = Packed((30, 70, 5), (30, 70, 5), head_size=16)
    inputs = packed.inputs(torch.float32)
    order = [2, 0, 1]
    turned = [torch.cat([each.split(packed.queries)[i] for i in order]) for each in inputs]
    lengths = tuple(packed.queries[i] for i in order)
    output = _run(packed._replace(queries=lengths, keys=lengths), turned)[0]
    expected = torch.cat([_run(packed, inputs)[0].split(packed.queries)[i] for i in order])
    assert torch.equal(output, expected)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    packed = Packed((200, 30), (200, 30), heads=4, kv_heads=2)
    runs = []
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        inputs = packed.inputs(torch.float32)
        output, lse = _run(packed, inputs)
        runs.append([output, lse, *torch.autograd.grad(output.sum(), inputs)])
    torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize(
    "drop", [(None, 0, 0, 0, 0, 1, -1, 0), (torch.arange(2), 9999, 3, 2**32 - 1, 7, 2, 5, 3)]
)
def test_opcheck(drop) -> None:
    packed = Packed((5, 9), (5, 9), head_size=8)
    inputs = packed.inputs(torch.bfloat16)
    rest = (starts(packed.queries), starts(packed.keys), 9, 9, 4, 0, 0.3, True, *drop)
    torch.library.opcheck(torch.ops.megalite.attention_forward, (*inputs, *rest))
    output, lse = (each.detach() for each in torch.ops.megalite.attention_forward(*inputs, *rest))
    plain = [each.detach() for each in inputs]
    arguments = (torch.ones_like(output), None, *plain, output, lse, *rest)
    torch.library.opcheck(torch.ops.megalite.attention_backward, arguments)


@pytest.mark.parametrize("mask", [None, counted_mask(2, 2)], ids=["plain", "dropped"])
def test_compiled_as_one_graph(mask) -> None:
    packed = Packed((5, 9), (5, 9), head_size=8, mask=mask)
    inputs = packed.inputs(torch.float32)
    compiled = torch.compile(
        lambda *each: _run(packed, list(each))[0] * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(*inputs), _run(packed, inputs)[0] * 2)
    found = torch.autograd.grad(compiled(*inputs).sum(), inputs)
    expected = torch.autograd.grad((_run(packed, inputs)[0] * 2).sum(), inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_meta_tensors() -> None:
    query, key = torch.empty(7, 4, 8, device="meta"), torch.empty(9, 2, 8, device="meta")
    ends = torch.empty(2, dtype=torch.int32, device="meta")
    assert not why_not_packed(query)
    output, lse = packed_attention(query, key, key, ends, ends, max_seqlen_q=7, max_seqlen_k=9)
    assert (output.shape, lse.shape, lse.dtype) == ((7, 4, 8), (4, 7), torch.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 9], dtype=torch.int32)}, "from 0 to the number of tokens"),
        ({"cu_seqlens_q": torch.tensor([0, 8])}, "contiguous int32 vector"),
        ({"max_seqlen_k": 7}, "a sequence of 8 tokens, not 0 to 7"),
        ({"cu_seqlens_k": torch.tensor([0, 2, 8], dtype=torch.int32)}, "must have the same length"),
        ({"key": torch.zeros(8, 3, 4)}, "incompatible shapes"),
        ({"scale": -1.0}, "scale must be above 0, not -1"),
        ({"value": torch.zeros(8, 2, 4, dtype=torch.float64)}, "another dtype"),
    ],
)
def test_what_does_not_fit_is_refused(change, words) -> None:
    given = {"query": torch.zeros(8, 4, 4), "key": torch.zeros(8, 2, 4), "value": torch.zeros(8, 2, 4)}
    ends = {"cu_seqlens_q": starts((8,)), "cu_seqlens_k": starts((8,)), "max_seqlen_q": 8, "max_seqlen_k": 8}
    with pytest.raises(RuntimeError, match=words):
        packed_attention(**{**given, **ends, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"sample_indices": torch.zeros(3, dtype=torch.int64)},
            "cannot be split into 3 rows of equal length",
        ),
        ({"sample_indices": torch.zeros(2)}, "contiguous int64 vector"),
        ({"dropped": 65536}, "dropped must be 0 to 65535, not 65536"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(change, words) -> None:
    packed = Packed((8,), (8,), mask=counted_mask(1, 2)._replace(**change))
    with pytest.raises(RuntimeError, match=words):
        _run(packed, packed.inputs(torch.float32))


@pytest.mark.parametrize("positions", [(3, 0, 0), (2, -2, 0), (2, -1, 4), (2, 0, -1), (0, 0, 0)])
def test_positions_that_do_not_fit_are_refused(positions) -> None:
    packed = Packed((8,), (8,), positions=BlockPositions(2, 0, 0))
    inputs = packed.inputs(torch.float32)
    with pytest.raises(RuntimeError, match=r"rows|must be positions, or -1 and 0"):
        _run(packed._replace(positions=BlockPositions(*positions)), inputs)


def test_of_one_query_with_one_key_nothing_is_dropped_or_all() -> None:
    """With unit vectors as values and equal scores, the output shows the mask element by element."""
    mask = counted_mask(2, 3)
    query, value = torch.zeros(2 * 16, 3, 16), torch.eye(16).repeat(2, 1).unsqueeze(1)
    ends = starts((16, 16))
    output, _ = packed_attention(
        query, torch.zeros_like(value), value, ends, ends, max_seqlen_q=16, max_seqlen_k=16, mask=mask
    )
    keep, scale = mask.draw(16, 16)
    assert torch.equal(output.view(2, 16, 3, 16).transpose(1, 2), keep * scale / 16)


def _heads(rows: int, new: int, total: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(rows, length, heads, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for length, heads in ((new, 4), (total, 2), (total, 2))
    ]


MASKS = pytest.mark.parametrize("mask", [None, counted_mask(2, 4)], ids=["plain", "dropped"])


@MASKS
@pytest.mark.parametrize("window", [None, 7, 200])
@pytest.mark.parametrize(("new", "total"), [(80, 80), (1, 90), (5, 90)])
def test_causal_attention_fused_is_what_it_is_otherwise(new, total, window, mask) -> None:
    heads = _heads(2, new, total)
    fused = ops.compiled_attention(*heads, AttentionForm(window, mask=mask))
    assert fused.grad_fn is not None and "attention_forward" in str(fused.grad_fn.next_functions)
    _same_gradients(fused, ops.causal_attention(*heads, AttentionForm(window, mask=mask)), heads)


@MASKS
@pytest.mark.parametrize("window", [None, 7])
def test_documents_by_their_starts(window, mask) -> None:
    heads = _heads(2, 90, 90)
    lengths = torch.tensor([60, 1, 29]), torch.tensor([90])
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(each)), each) for each in lengths])
    documents = ops.document_cu_seqlens(ids)
    assert (documents.cu_seqlens.tolist(), documents.max_seqlen) == ([0, 60, 61, 90, 180], 90)
    form = ops.document_spans if mask is None else ops.documents_seen
    expected = ops.causal_attention(*heads, AttentionForm(window, form(ids), mask))
    for attend in (ops.compiled_attention, ops.causal_attention):
        _same_gradients(
            attend(*heads, AttentionForm(window, documents, mask)),
            expected,
            heads,
        )


def _same_gradients(one: Tensor, other: Tensor, heads: list[Tensor]) -> None:
    assert_close(one, other, what="attended")
    weights = torch.randn(one.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    found, expected = (
        torch.autograd.grad((each * weights).sum(), heads, retain_graph=True) for each in (one, other)
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs, what="gradients")


def test_what_the_operator_lacks_is_told_and_torch_serves() -> None:
    heads = _heads(1, 6, 6)
    assert "no mask that is written out" in ops.why_not_compiled(
        heads[0], AttentionForm(mask=counted_mask(1, 4).draw(6, 6))
    )
    ids = torch.zeros(1, 6, dtype=torch.int64)
    ops._tell.cache_clear()
    with pytest.warns(UserWarning, match="not compiled: it takes documents as cu_seqlens only"):
        spans = ops.compiled_attention(*heads, AttentionForm(documents=ops.document_spans(ids)))
    assert_close(spans, ops.causal_attention(*heads))


@pytest.mark.parametrize(
    ("dtype", "head_size", "words"),
    [(torch.float32, 64, "for 16-bit types, not torch.float32"), (torch.bfloat16, 80, "128, 256), not 80")],
)
def test_what_cuda_has_no_kernel_for_is_said(dtype, head_size, words) -> None:
    query = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 1, head_size))
    assert words in why_not_packed(query)


@pytest.mark.parametrize(
    ("limit", "dropout", "words"),
    [
        (
            99 * 1024,
            True,
            "heads of 128, with dropout, take 133128 bytes of shared memory, a block has 101376",
        ),
        (99 * 1024, False, ""),
        (163 * 1024, True, ""),
    ],
)
def test_a_chip_whose_blocks_have_too_little_shared_memory_is_said(limit, dropout, words) -> None:
    def needed(head_size: int, dropped: bool, backward: bool, any_order: bool, limit: int) -> int:
        assert head_size == 128 and not any_order
        return 133128 if dropped and backward else 65536

    query = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 1, 128))
    chip = SimpleNamespace(shared_memory_per_block_optin=limit)
    with (
        mock.patch.object(packed, "why_not", lambda kind: ""),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: chip),
        mock.patch.object(torch.ops.megalite, "attention_shared_memory", needed, create=True),
    ):
        complaint = why_not_packed(query, dropout=dropout)
        mask = counted_mask(1, 4) if dropout else None
        assert ops.why_not_compiled(query, AttentionForm(mask=mask)) == complaint
    assert words in complaint and bool(words) == bool(complaint)
