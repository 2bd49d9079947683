"""Rules over the files and folders that the settings name: do they exist here, can the run folder be written."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.hub_dataset import HUB_FORMS, HubDataset
from megalite.config.sections.toml import shown
from megalite.errors import Problem, closest_path

STANDARD_LIBRARY = "stdlib"
_LONGEST_PATH = 200
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://")
_RESUME_WORDS = ("auto", "never")


def run_folder_can_be_written(run: CheckedRun) -> Iterator[Problem]:
    folder = Path(run.run.folder)
    try:
        standing = next(each for each in (folder, *folder.parents) if each.exists() or each.is_symlink())
        why = _refusal(standing)
    except OSError as error:
        why = error.strerror or str(error)
    if not why:
        return
    message = f"{_named(run.run.folder)} cannot be written: {why}"
    remedy = "name another folder, for example runs/default"
    yield Problem.reset("run.folder", message, remedy, "runs/default")


def _refusal(standing: Path) -> str:
    """Return why nothing can be made in an existing path; "" where it can."""
    if not standing.exists():
        return f"{standing} is a link to a path that does not exist"
    if not standing.is_dir():
        return f"{standing} is a file"
    try:
        # Only a try tells: /proc, or a server that maps root to nobody, refuses what os.access permits.
        Path(tempfile.mkdtemp(prefix=".megalite-", dir=standing)).rmdir()
    except OSError as error:
        return f"no folder can be made in {standing} ({error.strerror or error})"
    return ""


def checkpoint_to_resume_exists(run: CheckedRun) -> Iterator[Problem]:
    resume = run.checkpoint.resume
    if resume in _RESUME_WORDS or exists(Path(resume)):
        return
    remedy = 'name a checkpoint or a run folder, or use "auto" or "never"'
    cure = {"checkpoint.resume": closest_path(Path(resume)) or "auto"}
    yield Problem("checkpoint.resume", f"{_named(resume)} does not exist", remedy, cure)


def text_exists(run: CheckedRun) -> Iterator[Problem]:
    for key, source in _sources(run):
        if HubDataset.is_named(source):  # whose files are fetched when the run prepares its text
            if HubDataset.of(source) is None:
                yield Problem(key, f"{_named(source)} is no name of a data set on the Hub", HUB_FORMS)
        elif not (source == STANDARD_LIBRARY or exists(Path(source).expanduser()) or is_prepared(source)):
            if _is_partly_prepared(source):
                message = (
                    f"{_named(source)} is not whole: its megalite data prepare was cut off, or still runs"
                )
                yield Problem(key, message, "wait for it, or run the same command again")
                continue
            if _ADDRESS.match(source):
                remedy = "mount the store as a folder (rclone mount, s3fs), or copy the files to a disk first"
                yield Problem(key, f"{_named(source)} is an address, and text is read from files", remedy)
                continue
            close = closest_path(Path(source).expanduser())
            # Else it is an item of a list or a table.
            alone = source in (run.data.source, run.data.validation)
            remedy = f'name a text file, a folder, a .jsonl or .parquet file, or "{STANDARD_LIBRARY}"'
            yield Problem(
                key,
                f"{_named(source)} does not exist",
                f"did you mean {close}?" if close else remedy,
                {key: close} if close and alone else {},
            )


def tokenizer_exists(run: CheckedRun) -> Iterator[Problem]:
    path = run.tokenizer.path
    if path is not None and not exists(Path(path)):
        remedy = "name a Hugging Face folder, tokenizer.json or sentencepiece .model, or run megalite tokenizer train"
        close, source = closest_path(Path(path)), run.data.source
        has_text = isinstance(source, str) and (
            source == STANDARD_LIBRARY or exists(Path(source).expanduser())
        )
        words = ["megalite", "tokenizer", "train", f"--source={source}", f"--output={path}"]
        yield Problem(
            "tokenizer.path",
            f"{_named(path)} does not exist",
            remedy,
            {"tokenizer.path": close} if close else {},
            words if has_text and not close else (),
        )


def is_prepared(source: str) -> bool:
    """Whether a source is X, X.bin or X.idx of a prepared pair."""
    prefix = prefix_of(source)
    index = prefix.with_name(f"{prefix.name}.idx") if prefix.name else prefix
    return exists(index) and not Path(source).expanduser().is_dir()


def _is_partly_prepared(source: str) -> bool:
    """Whether a preparation has begun the pair that a source names (data/files/partial_files.py)."""
    prefix = prefix_of(source)
    return any(exists(prefix.with_name(f".{prefix.name}{suffix}.partial")) for suffix in (".bin", ".idx"))


def prefix_of(source: str) -> Path:
    """Return X for X.bin and X.idx, and any other source itself."""
    path = Path(source).expanduser()
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def exists(path: Path) -> bool:
    """Whether a path exists; False for one that no file system has."""
    try:
        return path.exists()
    except OSError:  # a name that is too long, or a folder that may not be entered
        return False


def _sources(run: CheckedRun) -> Iterator[tuple[str, str]]:
    """Yield (setting, source) of every text of the run."""
    data = run.data
    named: list[tuple[str, str | Sequence[str] | None]] = [("data.source", data.source)]
    named += [
        (f"data.blend[{number}].source", part.source) for number, part in enumerate(data.blend or (), start=1)
    ]
    for key, sources in [*named, ("data.validation", data.validation)]:
        for source in [sources] if isinstance(sources, str) else sources or ():
            yield key, source


def _named(path: str) -> str:
    return f'"{path}"' if len(path) <= _LONGEST_PATH else shown(path)
