"""Attention in whole steps on an accelerator: no family makes a mask of S x S, repeats keys, or waits for the ids."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.model import layer
from megalite.ops import attention_backends, choice, chunked_attention
from megalite.ops.documents import longest_document, packed_cu_seqlens, row_cu_seqlens
from megalite.parallel.step_batch import StepBatch
from megalite.topology.axes import Layout
from tests.standin import test_meta
from tests.standin.test_meta import step_on_meta
from tests.support.attention import WaitsRefused
from tests.support.tiny import FAMILY_SHAPES, SEQUENCE_LENGTH
from tests.support.training import Job, global_batch


class Recorder(WaitsRefused):
    """Refuses squares of the sequence too, of at least two dimensions."""

    def created(self, name: str, tensor: Tensor) -> None:
        assert tensor.shape[-2:] != (SEQUENCE_LENGTH, SEQUENCE_LENGTH), f"{name} makes {tuple(tensor.shape)}"


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, enable_gqa: bool
) -> Tensor:
    """torch's own writes probabilities out on a device without kernels. It is given no mask."""
    assert is_causal and (enable_gqa or query.shape[1] == key.shape[1])
    return query + key.sum() + value.sum()


def with_documents(job: Job, step: int) -> StepBatch:
    batch = global_batch(job, step)
    if batch.document_ids is None:
        return batch
    places = row_cu_seqlens(batch.document_ids)
    return replace(batch, cu_seqlens=places, max_seqlen=longest_document(places, batch.document_ids.shape[1]))


@contextmanager
def on_an_accelerator() -> Iterator[None]:
    small = {"_DEVICE_SCORES": 1, "_FEWEST_QUERIES": 5}
    with (
        mock.patch.object(test_meta, "global_batch", with_documents),
        mock.patch.object(attention_backends.F, "scaled_dot_product_attention", sdpa),
        mock.patch.multiple(chunked_attention, **small),
        Recorder(),
    ):
        yield


# Heads of 8 elements, which flash kernels take.
WIDER: dict[str, Any] = {"hidden_size": 64, "head_dim": 8}


@pytest.mark.parametrize(
    ("family", "documents", "dtype"),
    [
        ("mistral", False, torch.bfloat16),
        ("mistral", True, torch.float32),
        ("gpt2", True, torch.bfloat16),
        ("gemma2", False, torch.float32),
        ("gemma2", True, torch.bfloat16),
        ("gemma3", True, torch.bfloat16),
    ],
)
def test_a_step_of_each_kind_of_attention(family: str, documents: bool, dtype: torch.dtype) -> None:
    job = Job(replace(FAMILY_SHAPES[family], **WIDER), documents=documents, dtype=dtype)
    with on_an_accelerator():
        step_on_meta(job)


def test_documents_go_along_with_the_micro_batches_of_a_schedule() -> None:
    job = Job(
        replace(FAMILY_SHAPES["llama 3"], **WIDER),
        Layout(pipeline=2),
        schedule="zbv",
        chunks_per_stage=2,
        documents=True,
        dtype=torch.bfloat16,
    )
    with on_an_accelerator():
        step_on_meta(job)


def test_layers_are_told_the_longest_document_of_the_batch() -> None:
    job = Job(replace(FAMILY_SHAPES["llama 3"], **WIDER), documents=True, dtype=torch.bfloat16)
    longest = with_documents(job, 0).max_seqlen
    assert longest is not None and longest < SEQUENCE_LENGTH
    packed = mock.Mock(side_effect=packed_cu_seqlens)
    with on_an_accelerator(), mock.patch.object(choice, "packed_cu_seqlens", packed):
        step_on_meta(job)
    assert {call.args[2] for call in packed.call_args_list} == {longest}


def test_compiled_layers_take_them_too() -> None:
    """In one graph: whatever asks the driver, or the host, ends the compilation."""
    layer._compiled.cache_clear()
    graph = mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))
    try:
        with mock.patch.object(test_meta, "global_batch", with_documents), graph:
            shape = replace(FAMILY_SHAPES["mistral"], **WIDER)
            step_on_meta(Job(shape, documents=True, dtype=torch.bfloat16, compile=True))
    finally:
        layer._compiled.cache_clear()


def test_without_cu_seqlens_the_ids_are_waited_for() -> None:
    """So that the tests above cannot pass unseen."""
    job = Job(replace(FAMILY_SHAPES["llama 3"], **WIDER), documents=True, dtype=torch.bfloat16)
    with (
        on_an_accelerator(),
        mock.patch.object(test_meta, "row_cu_seqlens", lambda ids: None),
        pytest.raises(AssertionError, match="nonzero"),
    ):
        step_on_meta(job)
