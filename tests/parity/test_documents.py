"""Documents in one row train as each does alone: token losses and every gradient, in every layout and family."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.parallel.cross_entropy import IGNORE_INDEX
from megalite.parallel.step_batch import StepBatch
from megalite.topology.axes import Layout
from megalite.topology.shape import RopeScaling
from megalite.verify.token_losses import recorded_losses, token_losses
from tests.support.museum import exhibit
from tests.support.options import Dropout, Recompute
from tests.support.parity import assert_close, assert_same_tensors
from tests.support.planted import Planted
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import (
    SEQUENCES,
    Job,
    RankResult,
    build,
    full_gradients,
    global_batch,
    local_batch,
    shards_of,
    train_on_rank,
)

# Documents have 1 to 12 tokens, four on average: shorter and longer ones than the scalings' switch share rows.
SHAPES = FAMILY_SHAPES | {
    "longrope": replace(
        FAMILY_SHAPES["phi3"],
        rope_scaling=RopeScaling(
            "longrope",
            4.0,
            original_max_position_embeddings=4,
            short_factor=(1.0, 1.1, 1.5),
            long_factor=(1.0, 2.5, 6.0),
        ),
    ),
    "dynamic": replace(
        tiny_shape(tied=True), max_position_embeddings=4, rope_scaling=RopeScaling("dynamic", 4.0)
    ),
}
FAMILIES = ("llama 3", "gpt2", "mistral", "qwen3", "gemma2", "gemma3", "longrope", "dynamic")
JOB = Job(tiny_shape(tied=True), documents=True)


def train_each_document_alone(job: Job) -> tuple[RankResult, Tensor]:
    """One step with every document as a row of its own, at position 0 and without a mask; and the token losses."""
    parts = build(job)
    batch = global_batch(job, 0)
    assert batch.document_ids is not None
    weight = (batch.loss_mask * (batch.labels != IGNORE_INDEX)).sum()
    losses_of_tokens = torch.zeros_like(batch.loss_mask)
    for row, documents in enumerate(batch.document_ids):
        for document in documents.unique():
            mine = (documents == document).nonzero().flatten()
            alone = StepBatch(
                batch.input_ids[row : row + 1, mine],
                torch.arange(len(mine)).unsqueeze(0),
                batch.labels[row : row + 1, mine],
                batch.loss_mask[row : row + 1, mine],
                batch.sample_indices[row : row + 1],
            )
            with recorded_losses(parts.stage) as recorded:
                loss = parts.stage(alone.input_ids, batch=alone)
            (loss.sum() / weight).backward()
            losses_of_tokens[row, mine] = recorded[0].detach()[0]
    tensors = {name: tensor.grad.double() for name, tensor in parts.stage.named_parameters()}
    result = RankResult(0, [float(losses_of_tokens.sum() / weight)])
    result.gradients = shards_of(parts.replica.parameters, tensors, parts.mesh)
    return result, losses_of_tokens


@pytest.fixture(scope="module")
def alone(ranks):
    @cache
    def run(job: Job) -> tuple[RankResult, Tensor]:
        [result] = ranks.run(train_each_document_alone, world_size=1, job=job)
        return result

    return run


def train_and_evaluate(job: Job) -> tuple[RankResult, Tensor | None, float]:
    """A step, and what one micro batch of all sequences and the evaluation of the batch gave before it."""
    parts = build(job)
    batch = local_batch(job, parts.mesh, 0)
    losses_of_tokens = token_losses(parts.stage, parts.pipeline, batch)
    total, weight = parts.pipeline.evaluate(batch).tolist()
    return train_on_rank(job), losses_of_tokens, total / weight


def _check(ranks, alone, job: Job) -> None:
    one = replace(
        job, layout=Layout(), sequence_parallel=False, schedule="1f1b", chunks_per_stage=1, recompute=Recompute(),
        micro_batch_size=1, compile=False,
    )  # fmt: skip
    expected, expected_losses = alone(one)
    results = ranks.run(train_and_evaluate, world_size=job.layout.world_size, job=job)
    trained = [result for result, _, _ in results]
    share = SEQUENCES // job.layout.data
    seen = 0
    for result, losses, mean in results:
        assert_close(result.losses, expected.losses, what="loss")
        assert_close(mean, expected.losses[0], what="evaluation")
        if losses is not None:
            mine = slice(result.dp_rank * share, (result.dp_rank + 1) * share)
            assert_close(losses, expected_losses[mine], what="token losses")
            seen += 1
    assert seen == job.layout.data * job.layout.tensor
    assert_same_tensors(full_gradients(job, trained), full_gradients(one, [expected]))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_trains_each_document_as_if_it_were_alone(ranks, alone, family):
    _check(ranks, alone, replace(JOB, shape=SHAPES[family], micro_batch_size=2))


def documents_of_the_first_row(micro_batches: Callable[..., Any]) -> Callable[..., Any]:
    def alike(self: Any, count: int) -> Any:
        pieces = micro_batches(self, count)
        return [
            replace(each, document_ids=each.document_ids[:1].expand_as(each.document_ids)) for each in pieces
        ]

    return alike


@exhibit(
    "Megatron-LM PR#5635",
    subject="data",
    there="with tensor parallelism and several rows in a micro batch, the mask of documents crashed or gave NaN",
    here="every row has the mask of its own documents, in every layout and micro batch",
    fault=Planted("megalite.parallel.step_batch:StepBatch.micro_batches", documents_of_the_first_row),
    costly=True,
)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"layout": Layout(tensor=2), "sequence_parallel": True}),
        ("llama 3", {"layout": Layout(pipeline=2)}),
        ("mistral", {"layout": Layout(pipeline=2), "schedule": "zbv", "chunks_per_stage": 2}),
        ("gpt2", {"layout": Layout(pipeline=2), "schedule": "interleaved_1f1b", "chunks_per_stage": 2}),
        ("qwen3", {"layout": Layout(tensor=2, data=2)}),
        ("longrope", {"layout": Layout(tensor=2), "sequence_parallel": True}),
        ("dynamic", {"layout": Layout(pipeline=2, data=2), "micro_batch_size": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_every_layout_trains_each_document_as_if_it_were_alone(ranks, alone, family, changes):
    _check(ranks, alone, replace(JOB, shape=SHAPES[family], **{"micro_batch_size": 2, **changes}))


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_attention_sees_its_document_only(ranks, alone, how):
    _check(ranks, alone, replace(JOB, shape=FAMILY_SHAPES["mistral"], recompute=Recompute(how)))


def test_dropped_attention_in_documents_is_the_same_in_every_layout(ranks):
    """The mask's counter is keyed by the place in the row, so there is no document alone to compare with."""
    job = replace(JOB, dropout=Dropout(attention=0.25), recompute=Recompute("selective"))
    [one] = ranks.run(train_on_rank, world_size=1, job=replace(job, recompute=Recompute()))
    results = ranks.run(train_on_rank, world_size=2, job=replace(job, layout=Layout(tensor=2)))
    for result in results:
        assert_close(result.losses, one.losses, what="loss")
    assert_same_tensors(
        full_gradients(replace(job, layout=Layout(tensor=2)), results), full_gradients(job, [one])
    )


@pytest.mark.slow
def test_compiled_layers_see_their_document_only(ranks, alone):
    _check(ranks, alone, replace(JOB, shape=FAMILY_SHAPES["mistral"], compile=True))
