"""Batches of every kind train on context-parallel ranks to the losses of one process."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megalite.config.sections.schema import RunConfig
from megalite.data.batches.stream_files import StreamFile
from megalite.data.batches.stream_loader import TrainingLoader
from megalite.data.ensure import RunData
from megalite.data.files.token_file import TokenFile
from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.parallel.mesh import ParallelMesh
from megalite.train.loaders import training_loader
from megalite.train.validation import held_out_set, validate
from tests.support.context_faults import planted_context_fault
from tests.support.museum import exhibit
from tests.support.parity import assert_close
from tests.support.planted import Planted
from tests.support.ranks import RankFailed, RanksHung
from tests.support.selection import cases
from tests.support.tiny import tiny_corpus, tiny_tokenizer
from tests.support.tiny_run import trainer_of, write_conversations, write_token_files

LENGTH = 128  # a rank has four blocks of 32 positions, or more
STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "text": {"data.document_mask": "true"},
    "packed conversations": {"data.kind": "instruct"},
    "length buckets": {"data.kind": "instruct", "data.packing": "none", "data.length_buckets": 4},
    "streamed": {"data.streaming": "true", "data.document_mask": "true"},
}
# Conversations have documents in every row, which only `gather` cuts by their work.
METHODS = {
    "text": "ring",
    "packed conversations": "gather",
    "length buckets": "gather",
    "streamed": "ulysses",
}


@dataclass(frozen=True)
class Trained:
    """The losses of a rank's steps, the shapes of its batches, and whether their rows were cut by work."""

    losses: list[float]
    shapes: list[tuple[int, ...]]
    by_work: bool
    validation: float | None


def data_of(kind: str, folder: Path, tokenizer: Path) -> RunData:
    if kind == "streamed":
        text = folder / "text.jsonl"
        return RunData(tokenizer, (), (), stream=(StreamFile(text, text.stat().st_size),))
    prefix = folder / ("train" if kind == "text" else "conversations")
    return RunData(tokenizer, (prefix,), (1.0,))


def train(kind: str, folder: Path, changes: dict[str, Any], fault: str | None = None) -> Trained:
    """Train the steps of a kind of data on this rank, and validate those of text."""
    tokenizer = folder / "tokenizer.json"
    settings = {"training.sequence_length": LENGTH, "training.steps": STEPS, "tokenizer.path": tokenizer}
    words = load_tokenizer(tokenizer)

    def loader(config: RunConfig, mesh: ParallelMesh, load: Any) -> TrainingLoader:
        with planted_context_fault(fault):
            return training_loader(config, data_of(kind, folder, tokenizer), load, mesh, words)

    vocabulary = {"model.vocab_size": max(101, words.vocab_size)}
    trainer, load = trainer_of(folder, {**settings, **vocabulary, **KINDS[kind], **changes}, loader)
    with trainer.batches:
        losses = [trainer.train_step().loss for _ in range(STEPS)]
    with trainer.prefetch(trainer.loader, end=4 * STEPS) as batches:
        read = [batches.step_batch(4 * step).ready() for step in range(STEPS)]
    validation = None
    if kind == "text":
        with planted_context_fault(fault):
            held_out = held_out_set(load, TokenFile.open(folder / "held"), None)
        validation = validate(trainer, {"held": held_out}).loss
    by_work = any(batch.blocks is not None for batch in read)
    return Trained(losses, [tuple(batch.input_ids.shape) for batch in read], by_work, validation)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_token_files(folder)
    write_conversations(folder / "conversations", LENGTH)
    lines = (json.dumps({"text": text}) + "\n" for text in tiny_corpus(200))
    (folder / "text.jsonl").write_text("".join(lines))
    tiny_tokenizer(folder)
    return folder


def compare(ranks, alone, kind: str, folder: Path, fault: str | None = None) -> list[Trained]:
    """Require of two context ranks the losses of one process."""
    changes = {"parallel.context": 2, "parallel.context_method": METHODS[kind]}
    results: list[Trained] = ranks.run(train, 2, kind=kind, folder=folder, changes=changes, fault=fault)
    for result in results:
        assert_close(result.losses, alone.losses, what="loss")
        if alone.validation is not None:
            assert_close(result.validation, alone.validation, what="validation loss")
    return results


def counted_by_every_context_rank(_: Any) -> property:
    return property(lambda place: place.counts_loss)


@exhibit(
    "torchtitan PR#3257",
    subject="data",
    there="where ranks share sequences, a validation counted the tokens of another number of ranks than the training",
    here="context ranks find the losses of one process, in training and in validation",
    fault=Planted("megalite.topology.place:RankPlace.counts_samples", counted_by_every_context_rank),
    case="text",
    costly=True,
)
@pytest.mark.parametrize("kind", cases(KINDS, core=["packed conversations", "length buckets"]))
def test_context_ranks_train_on_it_as_one_process(ranks, folder, kind):
    [alone] = ranks.run(train, kind=kind, folder=folder, changes={})
    for result in compare(ranks, alone, kind, folder):
        assert result.shapes == alone.shapes
        assert result.by_work == (METHODS[kind] == "gather")
    if kind == "length buckets":
        assert len(set(alone.shapes)) > 1, alone.shapes
    with pytest.raises(AssertionError) as departed:
        compare(ranks, alone, kind, folder, "other samples on each context rank")
    assert not isinstance(departed.value, RankFailed | RanksHung), departed.value
