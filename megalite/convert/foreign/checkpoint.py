"""Checkpoints of other programs: opened by their format's loader, and written as the first checkpoint of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from megalite.checkpoint.weights import WeightReader
from megalite.convert.foreign.new_run import new_run
from megalite.convert.foreign.streamed import ImportedRun, write_streamed
from megalite.convert.huggingface.load import take_tokenizer
from megalite.convert.huggingface.origin import CONFIG, keep_origin


@dataclass(frozen=True)
class ImportOptions:
    """The statements of a user on a checkpoint that does not make them itself.

    hf_config: config.json of its model, or a folder with one. vocab_size: rows of a padded table that are tokens.
    """

    hf_config: Path | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class ForeignCheckpoint:
    """An opened checkpoint of another program.

    run: its model, states, step, optimizer. reader: its canonical tensors under each of `run.state_keys`; whoever has
    the checkpoint closes it. step: of the other program's training, where it is known. hf_config: a config.json whose
    other keys, and tokenizer beside it, come along. notes: lines for the user; a reader may add some while it reads.
    precision: training.precision of the other program's run, where it is known.
    """

    run: ImportedRun
    reader: WeightReader
    step: int | None = None
    hf_config: Path | None = None
    notes: Sequence[str] = ()
    precision: str | None = None


class Loader(Protocol):
    """The module of a format that loads torch."""

    def open_checkpoint(self, place: Path, options: ImportOptions) -> ForeignCheckpoint:
        """Open the checkpoint that the format's `find` returned.

        Every tensor is accounted for before this returns: raises CheckpointError by name for one that is missing, of
        another shape, or of no parameter, and for a model that is not built.
        """

    def describe(self, place: Path) -> Iterator[str]:
        """Yield the lines of `megalite convert inspect`: layout, step, names and shapes; no tensor is read."""


def import_foreign(opened: ForeignCheckpoint, run_folder: Path) -> Path:
    """Write an opened checkpoint as a run's first one and close it; return the new checkpoint; one process.

    Raises CheckpointError where a file is damaged, the run has a checkpoint or cannot be written; then nothing is left.
    """
    run, config = opened.run, opened.hf_config
    with opened.reader as reader, new_run(run_folder):
        if config is not None:
            config = config / CONFIG if config.is_dir() else config
            keep_origin(config, run_folder)
            run = replace(run, config={**run.config, "tokenizer": take_tokenizer(config.parent, run_folder)})
        return write_streamed(run_folder, run, reader)
