"""A Megatron-LM checkpoint as a run's step 0, and what one says of itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite.convert.foreign_pickle import require_undamaged
from megalite.convert.megatron.arguments import OF_INTEREST, not_built
from megalite.convert.megatron.folder import find_megatron_folder
from megalite.convert.megatron.rank_files import open_megatron, open_rank
from megalite.convert.new_run import new_run
from megalite.convert.streamed import ImportedRun, write_streamed
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class MegatronImport:
    """The checkpoint that was written; notes: where copies of a tensor were not quite the same."""

    checkpoint: Path
    shape: ModelShape
    dtype: torch.dtype
    iteration: int | None
    notes: tuple[str, ...]


def import_megatron(folder: Path, run_folder: Path, vocab_size: int | None = None) -> MegatronImport:
    """Write a Megatron-LM checkpoint's weights, in their type, as step 0 of a run; one process.

    vocab_size: rows of the padded table that are tokens, where its arguments do not say it.
    Raises CheckpointError where it cannot be expressed or is not whole, and where the run has a checkpoint.
    """
    reader = open_megatron(folder, vocab_size)
    for path in find_megatron_folder(folder).files.values():
        require_undamaged(path)

    run = ImportedRun(reader.shape, {"model": {"weights": str(folder)}}, reader.dtype)
    with new_run(run_folder), reader:
        written = write_streamed(run_folder, run, reader)
    return MegatronImport(written, reader.shape, reader.dtype, reader.iteration, tuple(reader.notes))


def described(folder: Path) -> Iterator[str]:
    """Lines on a checkpoint, be it one that can be built here or not; no tensor is read."""
    ranks = find_megatron_folder(folder)
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
    for place, stage in enumerate(stages):
        for chunk, entries in enumerate(stage.entries):
            which = f", chunk {chunk}" if chunks > 1 else ""
            yield f"stage {place}{which}: {len(entries)} tensors, as tensor rank 0 has them"
            width = max(map(len, entries), default=0)
            for name, (shape, dtype) in entries.items():
                size = " x ".join(map(str, shape))
                yield f"  {name:<{width}}  {size:>16}  {str(dtype).removeprefix('torch.')}"
