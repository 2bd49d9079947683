"""Dropout by a given mask, and the attention that takes one."""

import pytest
import torch

from megalite.ops.attention import causal_attention
from megalite.ops.attention_form import AttentionForm
from megalite.ops.dropout import Mask, dropout
from tests.support.parity import assert_close


def _mask(*shape: int) -> Mask:
    return Mask(torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3, 1 / 0.7)


def test_value_and_gradient_are_those_of_the_product():
    values, mask = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True), _mask(3, 5, 7)
    weights = torch.randn_like(values)
    (dropout(values, mask) * weights).sum().backward()
    assert torch.equal(values.grad, weights * mask.keep * mask.scale)
    assert torch.equal(dropout(values, mask), values * mask.keep * mask.scale)


def test_without_a_mask_nothing_is_copied():
    values = torch.randn(3)
    assert dropout(values, None) is values


def test_only_the_mask_is_kept_for_the_backward():
    kept: list[torch.Tensor] = []
    values, mask = torch.randn(2, 3, requires_grad=True), _mask(2, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        dropout(values, mask)
    assert [each.dtype for each in kept] == [torch.bool]


@pytest.mark.parametrize("window", [None, 2, 9])
def test_attention_with_nothing_dropped_is_causal_attention(window):
    query = torch.randn(2, 5, 4, 6, dtype=torch.float64)
    key, value = torch.randn(2, 2, 5, 2, 6, dtype=torch.float64).unbind()
    everything = Mask(torch.ones(2, 4, 5, 5, dtype=torch.bool), 1.0)
    assert_close(
        causal_attention(query, key, value, AttentionForm(window, mask=everything)),
        causal_attention(query, key, value, AttentionForm(window)),
    )


def test_attention_drops_probabilities():
    query = torch.randn(1, 4, 2, 6, dtype=torch.float64)
    key, value = torch.randn(2, 1, 4, 2, 6, dtype=torch.float64).unbind()
    mask = _mask(1, 2, 4, 4)
    for head in range(2):
        scores = (query[0, :, head] @ key[0, :, head].T / 6**0.5).masked_fill(
            torch.ones(4, 4).triu(1).bool(), -torch.inf
        )
        expected = (scores.softmax(-1) * mask.keep[0, head] * mask.scale) @ value[0, :, head]
        attended = causal_attention(query, key, value, AttentionForm(mask=mask))
        assert_close(attended[0, :, head], expected)
