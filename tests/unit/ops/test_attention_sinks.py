"""Attention with sinks against the whole softmax, written out: output and every gradient."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.ops.attention_form import AttentionForm
from megalite.ops.choice import ALL_COMPILED, PLAIN_TORCH
from megalite.ops.decode_attention import decode_attention
from megalite.ops.documents import CuSeqlens, documents_of_block, numbered
from megalite.ops.dropout import CountedMask, dropout
from tests.support.kernels import needs_library
from tests.support.parity import OPERATOR_RTOL, assert_close

LENGTH = 96
DOCUMENTS = CuSeqlens(torch.tensor([0, 7, 40, 96, 100, 192], dtype=torch.int32), 92)


@dataclass(frozen=True)
class SinkCase:
    """queries: the last so many of the positions; the other fields as in AttentionForm."""

    queries: int = LENGTH
    window: int | None = None
    documents: bool = False
    drops: bool = False
    scale: float | None = None
    softcap: float | None = None

    def tensors(self) -> list[Tensor]:
        drawn = torch.Generator().manual_seed(4)
        sizes = ((2, self.queries, 6, 8), (2, LENGTH, 3, 8), (2, LENGTH, 3, 8), (6,), (2, self.queries, 6, 8))
        return [torch.randn(size, dtype=torch.float64, generator=drawn) for size in sizes]

    def form(self, sinks: Tensor) -> AttentionForm:
        mask = CountedMask((3, 5), torch.tensor([7, 9]), range(6), 64) if self.drops else None
        first = LENGTH - self.queries
        documents = documents_of_block(DOCUMENTS, LENGTH, range(first, LENGTH)) if self.documents else None
        return AttentionForm(self.window, documents, mask, self.scale, self.softcap, sinks=sinks)

    def whole(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, _: Tensor) -> Tensor:
        """The softmax over all scores and the sink, which is then left out."""
        first = LENGTH - self.queries
        key, value = (each.repeat_interleave(2, dim=2).transpose(1, 2) for each in (key, value))
        scores = query.transpose(1, 2) @ key.transpose(2, 3) * (self.scale or 8**-0.5)
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        seen = seen if self.window is None else seen.triu(1 - self.window)
        if self.documents:
            ids = numbered(DOCUMENTS, 2, LENGTH)
            seen = (seen & (ids.unsqueeze(1) == ids.unsqueeze(2))).unsqueeze(1)
        scores = scores.masked_fill(~seen[..., first:, :], -torch.inf)
        both = torch.cat((scores, sinks.view(1, 6, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
        probabilities = both.softmax(dim=-1)[..., :-1]
        mask = self.form(sinks).mask
        if isinstance(mask, CountedMask):
            probabilities = dropout(probabilities, mask.draw(self.queries, LENGTH))
        return (probabilities @ value).transpose(1, 2)


def _results(function: Any, case: SinkCase, tensors: list[Tensor]) -> list[Tensor]:
    inputs = [each.detach().clone().requires_grad_() for each in tensors[:4]]
    output = function(*inputs, tensors[4])
    return [output.detach(), *torch.autograd.grad(output, inputs, tensors[4])]


CASES = {
    "plain": SinkCase(),
    "window, documents": SinkCase(window=11, documents=True),
    "dropout": SinkCase(drops=True, window=30),
    "last queries, documents": SinkCase(queries=30, documents=True),
    "scale": SinkCase(queries=1, scale=0.7),
    "soft cap": SinkCase(softcap=1.5),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ops", [PLAIN_TORCH, pytest.param(ALL_COMPILED, marks=needs_library)])
def test_it_is_the_softmax_over_scores_and_sink(name: str, ops: Any) -> None:
    case = CASES[name]
    tensors = case.tensors()

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, _: Tensor) -> Tensor:
        return ops.attend(query, key, value, case.form(sinks))

    expected = _results(case.whole, case, tensors)
    assert all(each.any() for each in expected)
    for ours, theirs in zip(_results(attend, case, tensors), expected, strict=True):
        assert_close(ours, theirs, rtol=OPERATOR_RTOL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_and_gradients_have_the_types_of_their_inputs(dtype: torch.dtype) -> None:
    tensors = [each.to(dtype) for each in CASES["plain"].tensors()]

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, _: Tensor) -> Tensor:
        return PLAIN_TORCH.attend(query, key, value, AttentionForm(sinks=sinks))

    assert {each.dtype for each in _results(attend, CASES["plain"], tensors)} == {dtype}


@pytest.mark.parametrize("name", ["scale", "soft cap"])
def test_a_decoded_token_has_the_last_row(name: str) -> None:
    case = CASES[name]
    query, key, value, sinks, grad = case.tensors()
    whole = case.whole(query, key, value, sinks, grad)[:, -1]
    form = case.form(sinks)
    decoded = decode_attention(query[:, -1], key.transpose(1, 2), value.transpose(1, 2), None, form)
    assert_close(decoded, whole, rtol=OPERATOR_RTOL)
