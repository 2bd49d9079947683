"""Another program's checkpoint on the command line: its flags, its import, and a temporary run for an export of it."""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.checkpoint.manifest import WEIGHT
from megalite.cli.arguments import add_value
from megalite.cli.convert_quantise import check_quantise
from megalite.convert.exported_folder import require_free
from megalite.convert.foreign.formats import ForeignFormat, find_format
from megalite.convert.foreign.new_run import require_new
from megalite.errors import CheckpointError
from megalite.monitor.work import working

if TYPE_CHECKING:
    from megalite.convert.foreign.checkpoint import ForeignCheckpoint


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what another program's checkpoint does not say itself."""
    about = "config.json of the model, or its folder, for checkpoints that do not describe their model"
    add_value(parser, "--hf-config", Path, "PATH", about)
    about = "vocabulary size, for checkpoints that do not record the size before padding"
    add_value(parser, "--vocab-size", int, "TOKENS", about)


def find_foreign(folder: Path, options: argparse.Namespace) -> tuple[ForeignFormat, Path] | None:
    """Return what `find_format` returns. Raises CheckpointError for a flag that its format has no use for."""
    found = find_format(folder)
    for option in ("hf_config", "vocab_size"):
        if found is not None and getattr(options, option) is not None and option not in found[0].takes:
            flag = f"--{option.replace('_', '-')}"
            raise CheckpointError(f"{folder} is {found[0].name}, which says that itself; leave out {flag}")
    return found


def import_found(
    kind: ForeignFormat, place: Path, run_folder: Path, options: argparse.Namespace, *, whole: bool = True
) -> tuple[Path, "ForeignCheckpoint"]:
    """Write the checkpoint at `place` as the first one of a new run; return the new checkpoint and what was opened.

    whole: with the optimizer's state, if it has one, else its weights alone.
    """
    require_new(run_folder)  # before the source is opened, which may take long
    from megalite.convert.foreign.checkpoint import ImportOptions, import_foreign

    with working(f"importing {place}"):
        opened = kind.loader().open_checkpoint(place, ImportOptions(options.hf_config, options.vocab_size))
        if not whole:
            opened = replace(opened, run=replace(opened.run, state_keys=(WEIGHT,)))
        return import_foreign(opened, run_folder), opened


@contextmanager
def imported_for_export(options: argparse.Namespace) -> Iterator[Path | None]:
    """Import another program's checkpoint beside the export's folder for the time of the `with` block.

    Returns the temporary run folder; None if options.checkpoint is no single folder of another program. Raises
    CheckpointError, before the import, for flags that need a run and for an OUTPUT that is not free.
    """
    folder = options.checkpoint[0]
    found = find_foreign(folder, options) if len(options.checkpoint) == 1 and folder.is_dir() else None
    if found is None:
        for option in ("hf_config", "vocab_size"):
            if getattr(options, option) is not None:
                flag = f"--{option.replace('_', '-')}"
                raise CheckpointError(f"{folder} is no checkpoint of another program; leave out {flag}")
        yield None
        return
    _check_export(found[0], options)
    above = next(parent for parent in options.output.resolve().parents if parent.is_dir())
    try:
        run = Path(tempfile.mkdtemp(prefix=f"{options.output.name}.import-", dir=above))
    except OSError as error:
        raise CheckpointError(f"{above} cannot be written ({error}); name another OUTPUT") from error
    try:
        import_found(*found, run, options, whole=False)
        yield run
    finally:
        shutil.rmtree(run, ignore_errors=True)


def _check_export(kind: ForeignFormat, options: argparse.Namespace) -> None:
    """Raise what an export raises, where that does not need the imported run: the import of a large one takes hours."""
    folder = options.checkpoint[0]
    for flag in ("adapter", "base", "average", "steps"):
        if getattr(options, flag) not in (None, False):
            raise CheckpointError(f"{folder} is {kind.name}, not a run of megalite; leave out --{flag}")
    if options.weights not in (None, WEIGHT):
        raise CheckpointError(
            f"{folder} is {kind.name}, which is exported with its weights; leave out --weights"
        )
    check_quantise(options, options.tokenizer or folder)  # a tokenizer may come with the import
    from megalite.convert.huggingface.export import CARD
    from megalite.convert.huggingface.model_card import is_our_card
    from megalite.data.tokenizers.tokenizer import tokenizer_file

    require_free(options.output, "a Hugging Face export", lambda output: is_our_card(output / CARD))
    if options.tokenizer is not None:
        tokenizer_file(options.tokenizer)
