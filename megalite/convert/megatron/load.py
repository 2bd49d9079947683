"""A Megatron-LM checkpoint's weights as a run's step 0, and the lines that describe a checkpoint."""

from collections.abc import Iterator
from pathlib import Path

from megalite.convert.foreign import ForeignCheckpoint, ImportOptions
from megalite.convert.foreign_pickle import require_undamaged
from megalite.convert.megatron.arguments import OF_INTEREST, not_built
from megalite.convert.megatron.folder import find_megatron_folder
from megalite.convert.megatron.rank_files import open_megatron, open_rank
from megalite.convert.streamed import ImportedRun


def open_checkpoint(place: Path, options: ImportOptions) -> ForeignCheckpoint:
    """Open a Megatron-LM checkpoint's weights, in their type.

    Raises CheckpointError where the model cannot be expressed, or the files are damaged or not whole.
    """
    reader = open_megatron(place, options.vocab_size)
    for path in find_megatron_folder(place).files.values():
        require_undamaged(path)
    run = ImportedRun(reader.shape, {"model": {"weights": str(place)}}, reader.dtype)
    return ForeignCheckpoint(run, reader, reader.iteration, notes=reader.notes)


def describe(place: Path) -> Iterator[str]:
    """Lines on a checkpoint, be it one that can be built here or not; no tensor is read."""
    ranks = find_megatron_folder(place)
    stages = [open_rank(ranks.files[stage, 0]) for stage in range(ranks.pipeline)]
    first, chunks = stages[0], len(stages[0].chunks)
    size_bytes = sum(path.stat().st_size for path in ranks.files.values())
    virtual = f" x {chunks} chunks" if chunks > 1 else ""
    yield f"{ranks.path}: a Megatron-LM checkpoint of tensor {ranks.tensor} x pipeline {ranks.pipeline}{virtual}"
    yield f"  iteration {first.iteration}, checkpoint_version {first.version:g}"
    yield f"  {size_bytes:,} bytes in {len(ranks.files)} files"
    table = first.arguments.table
    yield f"  args: {', '.join(f'{name} {table[name]}' for name in OF_INTEREST if name in table)}"
    if foreign := list(not_built(first.arguments)):
        yield f"  not supported: {', '.join(foreign)}"
    for number, stage in enumerate(stages):
        for chunk, entries in enumerate(stage.entries):
            which = f", chunk {chunk}" if chunks > 1 else ""
            yield f"stage {number}{which}: {len(entries)} tensors, as tensor rank 0 has them"
            width = max(map(len, entries), default=0)
            for name, (shape, dtype) in entries.items():
                size = " x ".join(map(str, shape))
                yield f"  {name:<{width}}  {size:>16}  {str(dtype).removeprefix('torch.')}"
