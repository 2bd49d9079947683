"""Blocks of attention, merged, are attention: wherever keys are cut and in whatever order they come."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from megalite.ops.context_ring import AttentionBlock, BlockForm, attend_block, block_gradients, merge_block
from megalite.ops.documents import CuSeqlens
from tests.support.attention import WaitsRefused
from tests.support.kernels import needs_library
from tests.support.parity import OPERATOR_RTOL, assert_close
from tests.support.rings import DOCUMENTS, RingCase

CASE = RingCase(window=20, documents=DOCUMENTS, dropout=True)
# A block before all keys of the window, one within a document, one behind the queries.
CUTS = (0, 3, 14, 25, 32)


def _form(case: RingCase) -> BlockForm:
    return BlockForm(case.form, case.rows, case.length, case.compiled)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=needs_library)], ids=["torch", "compiled"]
)
@pytest.mark.parametrize("order", [1, -1])
def test_blocks_of_keys_come_in_any_order(compiled, order) -> None:
    case = replace(CASE, compiled=compiled)
    form, (query, key, value, grad) = _form(case), case.tensors()
    output, lse = torch.zeros_like(query), torch.full((4, 2, 32), -torch.inf, dtype=torch.float64)
    blocks = [AttentionBlock(range(32), range(begin, end)) for begin, end in pairwise(CUTS)][::order]
    for block in blocks:
        keys = slice(block.keys.start, block.keys.stop)
        part, part_lse = attend_block(query, key[:, keys], value[:, keys], block, form)
        assert torch.isfinite(part).all()
        merge_block(output, lse, part, part_lse)
    grads = [torch.zeros_like(each) for each in (query, key, value)]
    for block in blocks:
        keys = slice(block.keys.start, block.keys.stop)
        heads = query, key[:, keys], value[:, keys]
        parts = block_gradients(grad, heads, (output, lse), block, form)
        for whole, part, place in zip(grads, parts, (slice(None), keys, keys), strict=True):
            whole[:, place] += part
    for ours, alone in zip([output, *grads], case.attend_alone(torch.float64), strict=True):
        assert_close(ours, alone, rtol=OPERATOR_RTOL)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("documents", [(), DOCUMENTS])
def test_no_block_with_a_visible_key_is_left_out(window, documents) -> None:
    form = _form(replace(CASE, window=window, documents=documents, dropout=False))
    ids = form.document_ids
    place = torch.arange(32)
    seen = (place <= place.unsqueeze(1)).expand(2, -1, -1).clone()
    if window is not None:
        seen &= place > place.unsqueeze(1) - window
    if ids is not None:
        seen &= ids.unsqueeze(1) == ids.unsqueeze(2)
    left_out = 0
    for queries in (range(begin, begin + 4) for begin in range(0, 32, 4)):
        for keys in (range(begin, begin + 4) for begin in range(0, 32, 4)):
            visible = bool(seen[:, queries.start : queries.stop, keys.start : keys.stop].any())
            sees = form.sees(AttentionBlock(queries, keys))
            assert sees or not visible
            left_out += not sees
    assert left_out >= 28  # all that causality excludes; more with a window


def test_the_host_does_not_wait_for_the_documents_of_a_device() -> None:
    documents = CuSeqlens(torch.empty(7, dtype=torch.int32, device="meta"), 32)
    case = replace(CASE, dropout=False)
    form = replace(_form(case), form=case.form._replace(documents=documents))
    heads = [each.to("meta") for each in case.tensors()[:3]]
    with WaitsRefused():
        assert form.first_key(range(16, 32)) == 0
        assert form.first_key(range(24, 32)) == 5  # the window's
        output, lse = attend_block(*heads, AttentionBlock(range(32), range(32)), form)
    assert output.shape == heads[0].shape and lse.shape == (4, 2, 32)


def test_other_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="takes documents as CuSeqlens"):
        BlockForm(CASE.form._replace(prefix=3), 2, 32)
    with pytest.raises(ValueError, match="takes documents as CuSeqlens"):
        BlockForm(CASE.form._replace(documents=torch.ones(2, 1, 32, 32, dtype=torch.bool)), 2, 32)
