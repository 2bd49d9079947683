"""Probe of the whole model: no document of a sample may see another one.

First the tokens of every second document change, except its last, the end-of-document token. The losses of the other
documents must not change by a bit, on any attention path; the loss at the end-of-document token must change. An expert
multiplies the tokens of all documents at once, so that losses of a mixture may change by rounding: as much as earlier
tokens' losses do when the second half of each row changes. Then every second token of each document changes: at
least one loss at the unchanged tokens of the document must change. Only tokens near the start of a document are
checked, because rounding hides small contributions in long documents. Finally the first document of each row moves to
the row's end: all losses must stay the same up to rounding, else positions count from the row's start. The probe finds
document boundaries from the tokens alone, independently of the loader.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megalite.parallel.cross_entropy import IGNORE_INDEX
from megalite.parallel.step_batch import TRAINING, StepBatch
from megalite.topology.shape import ModelShape
from megalite.train.step.precision import DTYPES
from megalite.train.step.train_step import TrainStep
from megalite.verify.token_losses import token_losses

# Relative tolerance where kernels get other shapes, and round differently.
_ROUNDED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
# A difference of so many units in the last place of a loss may be of experts that got another number of tokens.
_LEAST_ROUNDING = 64

# The smallest share of one token in an attention average, in units of rounding, that must change the loss.
_AUDIBLE = 16


@dataclass(frozen=True)
class DocumentFindings:
    """The result of a probe of one micro batch: the number of documents that share a row, and the leaks."""

    documents: int
    leaks: tuple[str, ...] = ()


def probe_run(trainer: TrainStep, end_of_document_id: int) -> DocumentFindings | None:
    """Probe the run's next batch; None where no document mask separates texts, or other ranks have parts of a row.

    Collective.
    """
    config, mesh = trainer.config, trainer.mesh
    if not config.data.document_mask or config.data.kind != "text" or mesh.cp.size > 1:
        return None
    dtype = DTYPES[config.training.precision]
    loss_dtype = torch.promote_types(dtype, torch.float32)
    batch = trainer.loader.step_batch(trainer.state.samples, dtype=loss_dtype)
    model = config.model
    rates = (model.embedding_dropout, model.residual_dropout, model.mlp_dropout, model.attention_dropout)
    return probe_documents(
        partial(token_losses, trainer.stage, trainer.pipeline, mode=TRAINING),
        trainer.transfer.start(batch).ready(),
        end_of_document_id=end_of_document_id,
        shape=trainer.shape,
        dtype=dtype,
        moved=not any((*rates, config.adapter.dropout)),
    )


def probe_documents(
    token_losses: Callable[[StepBatch], Tensor | None],
    micro_batch: StepBatch,
    *,
    end_of_document_id: int,
    shape: ModelShape,
    dtype: torch.dtype,
    moved: bool = True,
) -> DocumentFindings:
    """Probe a pipeline for leaks between documents. Collective over the replica.

    dtype: the model's dtype. moved: whether to move documents within their rows too, which changes dropout masks.
    """
    documents, positions = _numbered(micro_batch, end_of_document_id)
    counted = micro_batch.labels != IGNORE_INDEX
    leaks = list(_wrong_numbers(micro_batch, documents, positions, counted))
    everything = replace(micro_batch, loss_mask=torch.ones_like(micro_batch.loss_mask))
    base, again = token_losses(everything), token_losses(everything)
    # 0 except for kernels that round differently from call to call.
    noise = 0.0 if base is None or again is None else 10 * (base - again).abs().max().item()
    rounding = 0.0 if base is None else _ROUNDED[dtype] * base.abs().max().item()
    ends = micro_batch.input_ids == end_of_document_id
    others = _others(micro_batch.input_ids, end_of_document_id, shape.vocab_size)
    allowed = noise
    if any(map(shape.has_experts, range(shape.num_hidden_layers))):
        later = _second_half(micro_batch.input_ids)
        ids = torch.where(later & ~ends, others, micro_batch.input_ids)
        losses = token_losses(replace(everything, input_ids=ids))
        if base is not None and losses is not None:
            measured = 10 * (base - losses).abs()[~later].max().item()
            least = _LEAST_ROUNDING * torch.finfo(base.dtype).eps * base.abs().max().item()
            allowed = max(noise, least, min(measured, rounding))
    audible = counted & ((positions + 1) * torch.finfo(dtype).eps * _AUDIBLE <= 1)
    for changed in (documents % 2 == 0, documents % 2 == 1, positions % 2 == 0):
        chosen = changed & ~ends
        ids = torch.where(chosen, others, micro_batch.input_ids)
        losses = token_losses(replace(everything, input_ids=ids))
        if base is not None and losses is not None:
            difference = (base - losses).abs()
            told = difference > allowed
            touched = _anywhere(chosen, documents)
            leaks += _told(told & ~touched & counted, micro_batch, "changes with another document")
            # These tokens did not change, but earlier tokens of their document did.
            asked = touched & ~chosen & audible & (positions > 0)
            deaf = asked & ~_anywhere(asked & told, documents)
            leaks += _told(deaf, micro_batch, "does not change with its own document")
    if moved and micro_batch.document_ids is not None:
        order = _first_to_the_end(documents)
        losses = token_losses(_reordered(everything, order))
        if base is not None and losses is not None:
            before = base.gather(1, order)
            elsewhere = (losses - before).abs() > rounding
            leaks += _told(
                elsewhere & counted.gather(1, order), everything, "changes with its document's place"
            )
    return DocumentFindings(_sharing(micro_batch, end_of_document_id), tuple(leaks))


def _numbered(batch: StepBatch, end_of_document_id: int) -> tuple[Tensor, Tensor]:
    """Return each token's document and its position there, found by scanning the rows."""
    documents, positions = [], []
    for row in batch.input_ids.tolist():
        document = place = 0
        for token in row:
            documents.append(document)
            positions.append(place)
            place += 1
            if token == end_of_document_id:
                document, place = document + 1, 0
    ids = batch.input_ids
    return torch.tensor(documents).to(ids.device).view_as(ids), torch.tensor(positions).to(
        ids.device
    ).view_as(ids)


def _sharing(batch: StepBatch, end_of_document_id: int) -> int:
    """Return the number of documents that share a row with another one; padding does not count."""
    documents, _ = _numbered(batch, end_of_document_id)
    last = documents.masked_fill(batch.labels == IGNORE_INDEX, 0).amax(dim=1)
    return int((last + 1)[last > 0].sum())


def _wrong_numbers(batch: StepBatch, documents: Tensor, positions: Tensor, counted: Tensor) -> Iterator[str]:
    if batch.document_ids is None:
        yield "the batch does not number its documents"
        return
    for name, given, expected in (
        ("document", batch.document_ids - batch.document_ids[:, :1], documents),
        ("position", batch.position_ids, positions),
    ):
        for row, column in ((given != expected) & counted).nonzero()[:1].tolist():
            yield (
                f"token {column} of sample {int(batch.sample_indices[row])} has {name} {int(given[row, column])}, "
                f"not {int(expected[row, column])}"
            )


def _others(ids: Tensor, end_of_document_id: int, vocab_size: int) -> Tensor:
    """Return another id for each token, never the end-of-document id."""
    following = (ids + 1) % vocab_size
    return torch.where(following == end_of_document_id, (ids + 2) % vocab_size, following)


def _second_half(ids: Tensor) -> Tensor:
    """Return which tokens [b, S] are in the second half of their row: no token of the first half sees them."""
    length = ids.shape[1]
    return (torch.arange(length, device=ids.device) >= length // 2).expand_as(ids)


def _anywhere(marked: Tensor, documents: Tensor) -> Tensor:
    """Return for each token whether any token of its document is marked."""
    counts = marked.new_zeros(len(documents), int(documents.max()) + 1, dtype=torch.int64)
    return counts.scatter_add_(1, documents, marked.long()).gather(1, documents) > 0


def _told(where: Tensor, batch: StepBatch, what: str) -> Iterator[str]:
    """Yield a message for the first of the tokens."""
    for row, column in where.nonzero()[:1].tolist():
        yield f"the loss at token {column} of sample {int(batch.sample_indices[row])} {what}"


def _first_to_the_end(documents: Tensor) -> Tensor:
    """Return the indices [b, S] that move each row's first document behind the others."""
    length = documents.shape[1]
    first = (documents == 0).sum(dim=1, keepdim=True)
    return (torch.arange(length, device=documents.device) + first) % length


def _reordered(batch: StepBatch, order: Tensor) -> StepBatch:
    assert batch.document_ids is not None
    ids = batch.document_ids
    behind = torch.where(ids == ids[:, :1], ids[:, -1:] + 1, ids)
    return replace(
        batch,
        input_ids=batch.input_ids.gather(1, order),
        labels=batch.labels.gather(1, order),
        position_ids=batch.position_ids.gather(1, order),
        document_ids=behind.gather(1, order),
        cu_seqlens=None,  # those given are for the original order
    )
