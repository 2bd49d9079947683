"""The probe's verdict on losses whose rounding hides small contributions of many tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.parallel.step_batch import StepBatch
from megalite.verify.document_probe import probe_documents
from tests.support.tiny import FAMILY_SHAPES

END, VOCABULARY = 0, 50
SHAPE = replace(FAMILY_SHAPES["llama 3"], vocab_size=VOCABULARY)
LENGTHS = ((3, 61, 96), (100, 5, 40, 15))
OWN, OTHER = "does not change with its own document", "changes with another document"


def own_document(ids: Tensor, documents: Tensor) -> Tensor:
    return (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril()


def whole_row(ids: Tensor, documents: Tensor) -> Tensor:
    return torch.ones_like(own_document(ids, documents)).tril()


def itself(ids: Tensor, documents: Tensor) -> Tensor:
    return torch.eye(ids.shape[1], dtype=torch.bool).expand(len(ids), -1, -1)


def ends_themselves(ids: Tensor, documents: Tensor) -> Tensor:
    return torch.where((ids == END).unsqueeze(-1), itself(ids, documents), own_document(ids, documents))


class Averages:
    """Losses made of a token's own id and of the mean over the ids that it sees, rounded."""

    def __init__(self, dtype: torch.dtype, sees: Callable[[Tensor, Tensor], Tensor]):
        self._dtype, self._sees = dtype, sees

    def token_losses(self, batch: StepBatch) -> Tensor:
        assert batch.document_ids is not None
        seen = self._sees(batch.input_ids, batch.document_ids).double()
        values = 3 * batch.input_ids.double().sin()
        mean = (seen @ values.unsqueeze(-1)).squeeze(-1) / seen.sum(dim=-1)
        return (30 + values + 2 * mean).to(self._dtype).float()


def batch() -> StepBatch:
    ids = torch.randint(1, VOCABULARY, (2, sum(LENGTHS[0])), generator=torch.Generator().manual_seed(1))
    documents, positions = torch.empty_like(ids), torch.empty_like(ids)
    for row, lengths in enumerate(LENGTHS):
        ids[row, torch.tensor(lengths).cumsum(0) - 1] = END
        documents[row] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions[row] = torch.cat([torch.arange(length) for length in lengths])
    ones = torch.ones_like(ids)
    return StepBatch(ids, positions, ones, ones.float(), torch.arange(2), document_ids=documents)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("sees", "leak"),
    [(own_document, None), (whole_row, OTHER), (itself, OWN), (ends_themselves, OWN)],
    ids=["sound", "leaking", "deaf", "deaf ends"],
)
def test_in_every_precision(dtype: torch.dtype, sees: Any, leak: str | None) -> None:
    pipeline: Any = Averages(dtype, sees)
    found = probe_documents(pipeline.token_losses, batch(), end_of_document_id=END, shape=SHAPE, dtype=dtype)
    assert found.documents == 7
    assert bool(found.leaks) == bool(leak)
    assert any(each.endswith(leak) for each in found.leaks) if leak else True
