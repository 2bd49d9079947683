"""A Megatron-LM checkpoint as a run's first one, and the lines that describe a checkpoint."""

from collections.abc import Iterator
from pathlib import Path

from megalite.convert.foreign.checkpoint import ForeignCheckpoint, ImportOptions
from megalite.convert.foreign.inspect import tensor_lines
from megalite.convert.foreign.streamed import ImportedRun
from megalite.convert.foreign.unpickle import require_undamaged
from megalite.convert.megatron.arguments import OF_INTEREST, not_built
from megalite.convert.megatron.folder import DISTRIBUTED_OPTIMIZER, find_megatron_folder, find_sharded_folder
from megalite.convert.megatron.rank_files import open_megatron, open_rank
from megalite.convert.megatron.sharded import describe_sharded, open_sharded
from megalite.convert.megatron.trained_ranks import open_trained
from megalite.convert.megatron.training_state import precision, trained_run, training_notes
from megalite.errors import counted


def open_checkpoint(place: Path, options: ImportOptions) -> ForeignCheckpoint:
    """Open a Megatron-LM checkpoint: with its training state in float32, or its weights alone in their type.

    Raises CheckpointError where the model cannot be expressed, or the files are damaged or not whole.
    """
    if (sharded := find_sharded_folder(place)) is not None:
        return open_sharded(sharded, options)
    reader = open_megatron(place, options.vocab_size)
    for path in reader.folder.files.values():
        require_undamaged(path)
    if (trained := open_trained(reader)) is not None:
        arguments = reader.ranks(0)[0].arguments
        run = trained_run(reader.shape, arguments, reader.iteration, trained.scalars)
        reader.notes.extend(training_notes(reader.shape, arguments, trained.scalars))
        known = precision(arguments)
        return ForeignCheckpoint(run, trained, reader.iteration, notes=reader.notes, precision=known)
    run = ImportedRun(reader.shape, {"model": {"weights": str(place)}}, reader.dtype)
    return ForeignCheckpoint(run, reader, reader.iteration, notes=reader.notes)


def describe(place: Path) -> Iterator[str]:
    """Lines on a checkpoint, be it one that can be built here or not; no tensor is read."""
    if (sharded := find_sharded_folder(place)) is not None:
        yield from describe_sharded(sharded)
        return
    ranks = find_megatron_folder(place)
    stages = [open_rank(ranks.files[stage, 0]) for stage in range(ranks.pipeline)]
    first, chunks = stages[0], len(stages[0].chunks)
    size_bytes = sum(path.stat().st_size for path in ranks.files.values())
    virtual = f" x {chunks} chunks" if chunks > 1 else ""
    yield f"{ranks.path}: a Megatron-LM checkpoint of tensor {ranks.tensor} x pipeline {ranks.pipeline}{virtual}"
    yield f"  iteration {first.iteration}, checkpoint_version {first.version:g}"
    yield f"  {size_bytes:,} bytes in {counted(len(ranks.files), 'file')}"
    if first.optimizer is not None:
        beside = (first.path.parent / DISTRIBUTED_OPTIMIZER).is_file()
        yield f"  optimizer: {'distributed, in ' + DISTRIBUTED_OPTIMIZER if beside else 'in the rank files'}"
    table = first.arguments.table
    yield f"  args: {', '.join(f'{name} {table[name]}' for name in OF_INTEREST if name in table)}"
    if foreign := list(not_built(first.arguments)):
        yield f"  not supported: {', '.join(foreign)}"
    for number, stage in enumerate(stages):
        for chunk, entries in enumerate(stage.entries):
            which = f", chunk {chunk}" if chunks > 1 else ""
            yield f"stage {number}{which}: {len(entries)} tensors, as tensor rank 0 has them"
            yield from tensor_lines(entries)
