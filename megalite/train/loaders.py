"""The loaders of a run's token files: of training, and of each validation set."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.config.sections.schema import RunConfig
from megalite.data.batches.blend import SampleOrder
from megalite.data.batches.bucket_loader import BucketLoader
from megalite.data.batches.conversation_rows import samples_of
from megalite.data.batches.loader import BatchShare, StepLoader
from megalite.data.batches.megatron_loader import MegatronLoader
from megalite.data.batches.megatron_order import (
    MegatronOrder,
    prepare_samples,
    training_order,
    validation_order,
)
from megalite.data.batches.stream_lane import StreamText
from megalite.data.batches.stream_loader import StreamLoader, TrainingLoader
from megalite.data.ensure import RunData
from megalite.data.files.token_file import TokenFile
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.parallel.mesh import ParallelMesh
from megalite.train.validation import HeldOutSet, held_out_set

# Batches that are read beside data.prefetch: the next step's, and the one behind it.
_STEPS_AHEAD = 2


def loader_maker(
    config: RunConfig, mesh: ParallelMesh, tokenizer: Tokenizer | None
) -> Callable[..., StepLoader]:
    """Return what makes a StepLoader of token files and of what is not the same in training and validation.

    The further arguments are those of SampleOrder, but the seed and the samples that stay together.
    """

    def load(token_file: TokenFile | Sequence[TokenFile], **order: Any) -> StepLoader:
        return StepLoader(
            token_file,
            _share_of_the_batch(config, mesh),
            SampleOrder(config.run.seed, together=config.data.rows_together, **order),
            samples_of=samples_of(config.data, config.run.seed),
            # Without a tokenizer the padding, which the loss ignores, may be any id.
            pad_id=0 if tokenizer is None else tokenizer.end_of_document_id,
            document_mask=config.data.document_mask,
        )

    return load


def training_loader(
    config: RunConfig,
    data: RunData,
    load: Callable[..., StepLoader],
    mesh: ParallelMesh,
    tokenizer: Tokenizer | None,
) -> TrainingLoader:
    """Return the loader of the blended training files, of the length buckets of one, of Megatron's order, or of
    streamed text.

    load: `loader_maker`'s.
    """
    if data.stream:
        assert tokenizer is not None, "a rule asks for it"
        return _stream_loader(config, data, mesh, tokenizer)
    if config.data.order == "megatron":
        return _megatron_loader(config, data.train, training_order(config), mesh, tokenizer)
    if config.data.length_buckets:
        [prefix] = data.train
        return BucketLoader(
            TokenFile.open(prefix),
            _share_of_the_batch(config, mesh),
            buckets=config.data.length_buckets,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
        )
    return load(
        [TokenFile.open(prefix) for prefix in data.train],
        weights=data.weights,
        curriculum=[(part.step, part.weights) for part in config.data.curriculum],
        shuffle=config.data.shuffle,
        epochs=None if config.training.steps else config.training.epochs,
    )


def _share_of_the_batch(config: RunConfig, mesh: ParallelMesh) -> BatchShare:
    return BatchShare(
        config.training.sequence_length,
        config.batch.micro_batch_size,
        config.batch.micro_batches,
        mesh.batch.rank,
        mesh.batch.size,
    )


def _stream_loader(
    config: RunConfig, data: RunData, mesh: ParallelMesh, tokenizer: Tokenizer
) -> StreamLoader:
    settings = config.data
    text = StreamText(
        data.stream,
        text_column=settings.text_column,
        min_length=settings.min_length,
        seed=config.run.seed if settings.shuffle else None,
    )
    return StreamLoader(
        text,
        tokenizer,
        _share_of_the_batch(config, mesh),
        document_mask=settings.document_mask,
        remembered=settings.prefetch + _STEPS_AHEAD,
    )


def _megatron_loader(
    config: RunConfig,
    prefixes: Sequence[Path],
    order: MegatronOrder,
    mesh: ParallelMesh,
    tokenizer: Tokenizer | None,
) -> MegatronLoader:
    return MegatronLoader(
        prepare_samples(prefixes, order, Path(config.run.folder) / "data"),
        _share_of_the_batch(config, mesh),
        end_of_document_id=tokenizer.end_of_document_id
        if tokenizer is not None and config.data.document_mask
        else None,
    )


def held_out_sets(
    config: RunConfig,
    data: RunData,
    load: Callable[..., StepLoader],
    mesh: ParallelMesh,
    tokenizer: Tokenizer | None,
) -> Mapping[str, HeldOutSet]:
    """Return the validation sets by the names of their files; "validation" is a part of all files of Megatron's order.

    load: `loader_maker`'s.
    """
    if config.data.order == "megatron":
        samples, prefixes = config.validation.samples, data.validation or data.train
        every = config.validation.every
        assert not isinstance(every, str), "a rule asks for steps"
        if samples is None:  # a rule asks for it with validation text
            return {}
        loader = _megatron_loader(config, prefixes, validation_order(config), mesh, tokenizer)
        name = prefixes[0].name if data.validation else "validation"
        return {name: HeldOutSet(loader, samples, every)}
    files = {prefix.name: TokenFile.open(prefix) for prefix in data.validation}
    return {name: held_out_set(load, file, config.validation.samples) for name, file in files.items()}
