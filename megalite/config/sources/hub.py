"""Fetch model folders from the Hugging Face Hub into its cache, once, and only files of known kinds."""

import fcntl
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path

from megalite.errors import CheckpointError, closest_path

INDEX = "model.safetensors.index.json"
# Every file that is read besides the weights: none of them is code or a pickle.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
DESCRIPTION = (
    "config.json",
    "generation_config.json",
    INDEX,
    *_TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
)
_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})(?:@([\w./-]{1,100}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """A repository on the Hub: org/name or org/name@revision, where revision is a branch, tag or commit."""

    repository: str
    revision: str | None

    @classmethod
    def of(cls, text: str) -> "HubName | None":
        """Parse `text`; None if it is not of that form or is a path that exists here."""
        match = _NAME.fullmatch(text)
        return None if match is None or Path(text).exists() else cls(match[1], match[2])

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    def at(self, folder: Path) -> "HubName":
        """Return the name with the commit of the fetched folder as its revision."""
        return replace(self, revision=folder.name) if _COMMIT.fullmatch(folder.name) else self


def fetch_description(name: HubName) -> Path:
    """Fetch everything but the weights and return the folder in the cache. Raises CheckpointError."""
    return fetch(name, DESCRIPTION, required=("config.json",), one_of=_TOKENIZERS)


def fetch(name: HubName, files: Sequence[str], required: Sequence[str], one_of: Sequence[str] = ()) -> Path:
    """Fetch those of `files` that the repository has and return the folder in the cache.

    The Hub is not asked if the cache holds all `required` files and, if `one_of` is given, one of those. One process
    per machine fetches at a time; the others wait and then find the files in the cache. Raises CheckpointError if a
    required file cannot be had.
    """
    from huggingface_hub import constants, snapshot_download

    patterns = [escape(file) for file in files]

    def snapshot(*, cached: bool) -> Path:
        return Path(
            snapshot_download(
                name.repository, revision=name.revision, allow_patterns=patterns, local_files_only=cached
            )
        )

    with one_at_a_time(Path(constants.HF_HUB_CACHE), name.repository):
        try:
            folder = snapshot(cached=True)
            cached_files = {file for file in (*required, *one_of) if (folder / file).is_file()}
            if cached_files.issuperset(required) and (not one_of or cached_files.intersection(one_of)):
                return folder
        except (OSError, ValueError):
            pass  # not in the cache, incomplete there, or not a valid name
        try:
            folder = snapshot(cached=False)
        # The Hub's client raises the errors of several libraries.
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise _not_fetched(name, reason, offline=constants.HF_HUB_OFFLINE) from error
    # When the Hub cannot be reached, its client returns the cache's folder, which may be incomplete.
    if lacking := [file for file in required if not (folder / file).is_file()]:
        raise _not_fetched(name, f"it lacks {lacking[0]}", offline=constants.HF_HUB_OFFLINE)
    return folder


def _not_fetched(name: HubName, reason: str, *, offline: bool) -> CheckpointError:
    if offline:
        reason = "HF_HUB_OFFLINE is set and the cache is incomplete"
    revision = f" --revision {name.revision}" if name.revision else ""
    close = closest_path(Path(str(name)))
    remedy = f"did you mean {close}? Or on a machine" if close else "on a machine"
    return CheckpointError(
        f'"{name}" is not a folder here, and fetching it from the Hugging Face Hub failed ({reason}); {remedy}'
        f" with network access run: hf download {name.repository}{revision} --include '*.json' '*.safetensors'"
        " '*.model' 'merges.txt' --local-dir FOLDER, and name that folder; convert weights of another format with"
        " transformers' save_pretrained",
        key="MODEL",
        set={"MODEL": close} if close else {},
        value=str(name),
    )


@contextmanager
def one_at_a_time(cache: Path, repository: str) -> Iterator[None]:
    """Hold a lock file, so that one process per machine fetches a repository at a time."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f".megalite-{repository.replace('/', '--')}.lock").open("wb")
    except OSError:  # a read-only cache
        yield
        return
    with lock:
        with suppress(OSError):  # a file system without locks: each process fetches on its own
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
