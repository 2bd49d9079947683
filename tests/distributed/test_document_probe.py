"""The probe of the document mask finds no leak where there is none, and every planted one, whatever path is taken."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.data.batches import documents
from megalite.model import transformer
from megalite.model.attention import SelfAttention
from megalite.ops import attention, choice
from megalite.ops.attention_form import AttentionForm
from megalite.parallel.step_batch import TRAINING
from megalite.topology.axes import Layout
from megalite.verify.document_probe import DocumentFindings, probe_documents
from megalite.verify.token_losses import token_losses
from tests.support.options import Dropout, Recompute
from tests.support.tiny import FAMILY_SHAPES, MIXTURE_SHAPES
from tests.support.training import Job, build, local_batch

JOB = Job(FAMILY_SHAPES["llama 3"], micro_batch_size=8, documents=True)
GPT2 = replace(JOB, shape=FAMILY_SHAPES["gpt2"])
MIXTURE = replace(JOB, shape=MIXTURE_SHAPES["mixtral"])
DROPPED = replace(JOB, dropout=Dropout(attention=0.2))


def _unmasked(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def unmasked(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm, **options: Any) -> Tensor:
        return function(query, key, value, form._replace(documents=None), **options)

    return unmasked


def _one_span(spans: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda ids: spans(torch.zeros_like(ids))


def _shared_spans_causal(own: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda ids: torch.ones_like(own(ids)).tril()


def _unmasked_layer(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, form, *inputs: attend(self, form._replace(documents=None), *inputs)


def _window_alone(within: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda seen, window: within(torch.ones_like(seen).tril(), window)


def _each_itself(own: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda ids: own(ids).triu()


def _along_the_row(decode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def decoded(self: Any, inputs: Tensor, position_ids: Tensor, *others: Any, **rest: Any) -> Tensor:
        return decode(
            self, inputs, torch.arange(position_ids.shape[1]).expand_as(position_ids), *others, **rest
        )

    return decoded


def _not_anew(number: Callable[..., Any]) -> Callable[..., Any]:
    def numbered(ids: Any, *others: Any) -> Any:
        return number(ids, *others)[0], np.tile(np.arange(ids.shape[1]), (len(ids), 1))

    return numbered


def _end_with_the_next(number: Callable[..., Any]) -> Callable[..., Any]:
    """The end-of-document token begins a document instead of closing one."""

    def numbered(ids: Any, labels: Any, end: int) -> Any:
        begins = ids == end
        begins[:, 0] = False
        first = np.maximum.accumulate(np.where(begins, np.arange(ids.shape[1]), 0), axis=1)
        return begins.cumsum(axis=1), np.arange(ids.shape[1]) - first

    return numbered


# Name -> target, attribute, what it becomes, and the job whose path goes there.
FAULTS: dict[str, tuple[Any, str, Callable[..., Any], Job]] = {
    "spans ignored": (choice, "document_spans", _one_span, JOB),
    "documents of one span not told apart": (attention, "_own_document", _shared_spans_causal, JOB),
    "fused attention without its documents": (choice, "causal_attention", _unmasked, JOB),
    "fused attention of a mixture without its documents": (choice, "causal_attention", _unmasked, MIXTURE),
    "reference attention without its documents": (attention, "_within", _window_alone, DROPPED),
    "window without documents": (
        attention,
        "_within",
        _window_alone,
        replace(JOB, shape=FAMILY_SHAPES["mistral"]),
    ),
    "selective recompute without its documents": (
        SelfAttention,
        "_attend",
        _unmasked_layer,
        replace(JOB, recompute=Recompute("selective")),
    ),
    "model counts positions along the row": (transformer.Chunk, "decode", _along_the_row, GPT2),
    "loader counts positions along the row": (documents, "document_ids_and_positions", _not_anew, JOB),
    "tokens see themselves alone": (attention, "_own_document", _each_itself, DROPPED),
    "end of document belongs to the next": (documents, "document_ids_and_positions", _end_with_the_next, JOB),
}


def findings(job: Job, fault: str | None = None) -> DocumentFindings:
    planted: Any = nullcontext()
    if fault is not None:
        target, attribute, becomes, _ = FAULTS[fault]
        planted = mock.patch.object(target, attribute, becomes(getattr(target, attribute)))
    with planted:
        parts = build(job)
        return probe_documents(
            partial(token_losses, parts.stage, parts.pipeline, mode=TRAINING),
            local_batch(job, parts.mesh, 0),
            end_of_document_id=0,
            shape=job.shape,
            dtype=job.dtype,
            moved=job.dropout == Dropout(),
        )


def families_findings(dtype: torch.dtype) -> dict[str, DocumentFindings]:
    shapes = {**FAMILY_SHAPES, **MIXTURE_SHAPES}
    return {name: findings(replace(JOB, shape=shape, dtype=dtype)) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_no_family_lets_a_document_see_another(ranks, dtype):
    [found] = ranks.run(families_findings, world_size=1, dtype=dtype)
    assert {name: each.leaks for name, each in found.items() if each.leaks} == {}
    assert all(each.documents > 8 for each in found.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": Dropout(0.1, 0.1, 0.1, 0.2), "recompute": Recompute("selective")},
        {"recompute": Recompute("full"), "shape": FAMILY_SHAPES["mistral"]},
        {"layout": Layout(tensor=2), "sequence_parallel": True},
        {"layout": Layout(pipeline=2), "schedule": "zbv", "chunks_per_stage": 2},
        {"layout": Layout(data=2), "zero_stage": 3, "dtype": torch.float32},
        {"layout": Layout(data=2, expert=2), "micro_batch_size": 2, "shape": MIXTURE_SHAPES["deepseek_v3"]},
    ],
    ids=str,
)
def test_no_path_and_no_layout_lets_a_document_see_another(ranks, changes):
    job = replace(JOB, **{"micro_batch_size": 4, **changes})
    for found in ranks.run(findings, world_size=job.layout.world_size, job=job):
        assert found.leaks == () and found.documents > 4


@pytest.mark.parametrize("name", FAULTS)
def test_the_probe_finds_a_planted_leak(ranks, name):
    job = FAULTS[name][-1]
    [sound] = ranks.run(findings, world_size=1, job=job)
    assert sound.leaks == ()
    [faulty] = ranks.run(findings, world_size=1, job=job, fault=name)
    assert faulty.leaks


# Places alone that are wrong by some tokens may move a loss less than bf16 rounds.
@pytest.mark.parametrize("name", [each for each in FAULTS if each != "model counts positions along the row"])
def test_the_probe_finds_a_planted_leak_in_16_bits(ranks, name):
    job = replace(FAULTS[name][-1], dtype=torch.bfloat16)
    [faulty] = ranks.run(findings, world_size=1, job=job, fault=name)
    assert faulty.leaks


def test_the_leak_is_told_by_sample_and_token(ranks):
    [found] = ranks.run(findings, world_size=1, job=JOB, fault="fused attention without its documents")
    assert found.leaks[0].startswith("the loss at token ")
    assert found.leaks[0].endswith("changes with another document")
    [found] = ranks.run(findings, world_size=1, job=JOB, fault="loader counts positions along the row")
    assert "has position" in found.leaks[0]
    [found] = ranks.run(findings, world_size=1, job=replace(JOB, documents=False))
    assert found.leaks[0] == "the batch does not number its documents"


def compiled_findings(*, ignored: bool) -> DocumentFindings:
    seen = choice.documents_seen
    with mock.patch.object(choice, "documents_seen", _shared_spans_causal(seen) if ignored else seen):
        return findings(replace(JOB, compile=True))


@pytest.mark.slow
def test_compiled_layers_are_probed_too(ranks):
    [sound] = ranks.run(compiled_findings, world_size=1, ignored=False)
    assert sound.leaks == ()
    [faulty] = ranks.run(compiled_findings, world_size=1, ignored=True)
    assert faulty.leaks
