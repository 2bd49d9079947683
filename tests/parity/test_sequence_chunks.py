"""MLP and loss in chunks of the sequence: the whole's numbers in every layout, and no tensor of all its activations."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.model.dropout import DropoutSites, LayerMasks
from megalite.topology.adapter import Lora
from megalite.topology.axes import Layout
from tests.distributed.test_zero import assert_equal_to_one_process
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.kernels import needs_library
from tests.support.options import Dropout, Recompute
from tests.support.parity import LAYOUT_RTOL, relative_error
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, RankResult, build, full_gradients, local_batch, train_on_rank

DROPOUT = Dropout(embedding=0.1, residual=0.2, mlp=0.3, attention=0.25)
JOB = Job(tiny_shape(tied=True), dropout=DROPOUT, micro_batch_size=2, steps=2)
LORA = replace(
    JOB,
    shape=replace(tiny_shape(), adapter=Lora(3, 6.0, ("up_proj", "down_proj", "gate_proj", "q_proj"))),
    dropout=replace(DROPOUT, adapter=0.2),
)
# A micro batch has 2 x 12 tokens: 10 are two chunks of 5 positions and one of 2; a rank of two holds 6 positions.
CHUNK = 10
INNER = (JOB.shape.intermediate_size, 2 * JOB.shape.intermediate_size)
ROWS = JOB.shape.vocab_size
CASES = {
    "alone": JOB,
    "a token at a time": replace(JOB, sequence_chunk=1),
    "layers recomputed": replace(JOB, recompute=Recompute("full")),
    "attention recomputed": replace(JOB, recompute=Recompute("selective", layers=3)),
    "sequence parallel": replace(JOB, layout=Layout(tensor=2), sequence_parallel=True),
    "sequence parallel, adapters": replace(LORA, layout=Layout(tensor=2), sequence_parallel=True),
    "tensor and data": replace(JOB, layout=Layout(tensor=2, data=2)),
    "adapters, zbv": replace(LORA, layout=Layout(pipeline=2), schedule="zbv", chunks_per_stage=2),
    "zero bubble": replace(
        JOB, layout=Layout(pipeline=2), schedule="interleaved_zero_bubble", chunks_per_stage=2
    ),
    "dualpipev, sequence parallel": replace(
        JOB,
        layout=Layout(pipeline=2, tensor=2),
        sequence_parallel=True,
        schedule="dualpipev",
        chunks_per_stage=2,
    ),
    "norms of outputs, soft caps": replace(JOB, shape=FAMILY_SHAPES["gemma2"], layout=Layout(tensor=2)),
    "biases": replace(JOB, shape=FAMILY_SHAPES["gpt2"], layout=Layout(data=2)),
}
CORE = ("alone", "sequence parallel, adapters", "adapters, zbv", "dualpipev, sequence parallel")


@pytest.fixture(scope="module")
def whole(ranks):
    """A job without chunks in one process, computed once."""

    @cache
    def run(job: Job) -> RankResult:
        [result] = ranks.run(train_on_rank, world_size=1, job=job)
        return result

    return lambda job: run(Job(job.shape, dropout=job.dropout, micro_batch_size=2, steps=2, dtype=job.dtype))


@pytest.mark.parametrize("kernels", ["reference", pytest.param("fused", marks=needs_library)])
@pytest.mark.parametrize("name", cases(CASES, core=CORE))
def test_chunks_give_the_wholes_numbers(ranks, whole, name, kernels):
    job = replace(CASES[name], kernels=kernels, sequence_chunk=CASES[name].sequence_chunk or CHUNK)
    results = ranks.run(train_on_rank, world_size=job.layout.world_size, job=job)
    _assert_equal_to_one_process(job, results, whole(job), LAYOUT_RTOL)


@pytest.mark.parametrize("stage", cases([1, 2, 3], core=[3]))
def test_chunks_give_the_wholes_numbers_under_zero(ranks, whole, stage):
    job = replace(JOB, layout=Layout(data=2), zero_stage=stage, sequence_chunk=CHUNK, micro_batch_size=2)
    results = ranks.run(train_on_rank, world_size=2, job=job)
    assert_equal_to_one_process(job, results, whole(job))


@needs_library
@pytest.mark.parametrize("shape", [JOB.shape, FAMILY_SHAPES["gpt2"]], ids=["llama", "gpt2"])
def test_gradients_of_bf16_chunks_are_summed_in_float32(ranks, whole, shape):
    """One-token chunks would otherwise round a weight's sum 24 times."""
    alone = replace(JOB, shape=shape)
    exact = full_gradients(alone, [whole(alone)])
    job = replace(alone, dtype=torch.bfloat16, kernels="fused")
    errors = []
    for chunk in (0, 1):
        [result] = ranks.run(train_on_rank, world_size=1, job=replace(job, sequence_chunk=chunk))
        gradients = full_gradients(job, [result])
        errors.append({name: relative_error(gradients[name], exact[name]) for name in exact})
    plain, chunked = errors
    for name in exact:
        if ".mlp." in name:
            assert chunked[name] < 1.5 * plain[name], name


class _Sizes(TorchDispatchMode):
    """Notes the tensors with a last dim of the MLP's or of the vocabulary, and the most tokens of one."""

    def __init__(self) -> None:
        super().__init__()
        self.most_tokens = {"mlp": 0, "logits": 0}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.dtype == torch.float64:
                kind = {ROWS: "logits", **dict.fromkeys(INNER, "mlp")}.get(tensor.shape[-1])
                if kind and tensor.shape[0] != JOB.shape.hidden_size:  # a weight, or its gradient
                    tokens = tensor.numel() // tensor.shape[-1]
                    self.most_tokens[kind] = max(self.most_tokens[kind], tokens)
        return made


def most_tokens(job: Job) -> dict[str, int]:
    """Return the most tokens of a tensor of the MLP and of logits that a step makes."""
    parts = build(job)
    with _Sizes() as sizes:
        parts.forward_backward(local_batch(job, parts.mesh, 0))
    return sizes.most_tokens


@pytest.mark.parametrize("how", [Recompute(), Recompute("full")], ids=lambda how: how.mode)
def test_no_tensor_has_the_activations_of_more_tokens_than_a_chunk(ranks, how):
    [whole] = ranks.run(most_tokens, world_size=1, job=replace(JOB, recompute=how))
    assert whole == {"mlp": 24, "logits": 24}
    [chunked] = ranks.run(most_tokens, world_size=1, job=replace(JOB, recompute=how, sequence_chunk=CHUNK))
    assert chunked == {"mlp": CHUNK, "logits": CHUNK}


Masks = Callable[..., LayerMasks]


def _masks_of_the_first_chunk(right: Masks) -> Masks:
    def wrong(self: DropoutSites, context: Any, held: slice, *others: Any) -> LayerMasks:
        return right(self, context, slice(0, held.stop - held.start), *others)

    return wrong


def _masks_of_the_next_positions(right: Masks) -> Masks:
    """As if a chunk of each rank's positions were gathered into positions that follow one another."""

    def wrong(self: DropoutSites, context: Any, held: slice, *others: Any) -> LayerMasks:
        masks, whole = right(self, context, held, *others), right(self, context, slice(None)).mlp
        assert masks.mlp is not None and whole is not None
        first = held.start * 2
        keep = whole.keep[:, first : first + masks.mlp.keep.shape[1]]
        return masks._replace(mlp=masks.mlp._replace(keep=keep))

    return wrong


FAULTS = {
    "every chunk with the masks of the first": _masks_of_the_first_chunk,
    "masks of the next positions, not of each rank's": _masks_of_the_next_positions,
}


def train_with(job: Job, fault: str) -> RankResult:
    with mock.patch.object(DropoutSites, "mlp_masks", FAULTS[fault](DropoutSites.mlp_masks)):
        return train_on_rank(job)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_departs_from_the_whole(ranks, whole, fault):
    job = replace(CASES["sequence parallel"], sequence_chunk=CHUNK)
    results = ranks.run(train_with, world_size=2, job=job, fault=fault)
    with pytest.raises(AssertionError, match="relative error"):
        _assert_equal_to_one_process(job, results, whole(job), LAYOUT_RTOL)
