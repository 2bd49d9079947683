"""Model folders by their name on the Hugging Face Hub: fetched once, into its cache, and only files of known kinds."""

import fcntl
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path

from megalite.errors import CheckpointError

INDEX = "model.safetensors.index.json"
# All that is read of a folder beside its weights; nothing that Python would run or unpickle.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
DESCRIPTION = (
    "config.json",
    "generation_config.json",
    INDEX,
    *_TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
)
_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})(?:@([\w./-]{1,100}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """org/name or org/name@revision: a branch, a tag or a commit."""

    repository: str
    revision: str | None

    @classmethod
    def of(cls, text: str) -> "HubName | None":
        """None where something lies here under that name, or where it is no name of that form."""
        match = _NAME.fullmatch(text)
        return None if match is None or Path(text).exists() else cls(match[1], match[2])

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    def at(self, folder: Path) -> "HubName":
        """The name with the very commit that the fetched folder has."""
        return replace(self, revision=folder.name) if _COMMIT.fullmatch(folder.name) else self


def fetch_description(name: HubName) -> Path:
    """The folder in the cache with all but the weights; raises CheckpointError."""
    return fetch(name, DESCRIPTION, required=("config.json",), one_of=_TOKENIZERS)


def fetch(name: HubName, files: Sequence[str], required: Sequence[str], one_of: Sequence[str] = ()) -> Path:
    """The folder in the cache with those of `files` that there are; raises CheckpointError without the required.

    Where the cache has these and `one_of` those that most have, it is taken without asking the Hub. One process of
    a machine fetches at a time, and so the others find what the first one fetched.
    """
    from huggingface_hub import constants, snapshot_download

    patterns = [escape(file) for file in files]

    def snapshot(*, cached: bool) -> Path:
        return Path(
            snapshot_download(
                name.repository, revision=name.revision, allow_patterns=patterns, local_files_only=cached
            )
        )

    with _one_at_a_time(Path(constants.HF_HUB_CACHE), name):
        try:
            folder = snapshot(cached=True)
            held = {file for file in (*required, *one_of) if (folder / file).is_file()}
            if held.issuperset(required) and (not one_of or held.intersection(one_of)):
                return folder
        except (OSError, ValueError):
            pass  # not in the cache, not all of it, or no name after all
        try:
            folder = snapshot(cached=False)
        # Its client passes on the errors of several libraries.
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise CheckpointError(_not_fetched(name, reason, offline=constants.HF_HUB_OFFLINE)) from error
    # Where the Hub cannot be reached, its client gives what the cache has.
    if lacking := [file for file in required if not (folder / file).is_file()]:
        raise CheckpointError(_not_fetched(name, f"it lacks {lacking[0]}", offline=constants.HF_HUB_OFFLINE))
    return folder


def _not_fetched(name: HubName, reason: str, *, offline: bool) -> str:
    if offline:
        reason = "HF_HUB_OFFLINE is set, and the cache has not all of it"
    revision = f" --revision {name.revision}" if name.revision else ""
    return (
        f'"{name}" is no folder here, and could not be fetched from the Hugging Face Hub ({reason}); where there is'
        f" a network, run: hf download {name.repository}{revision} --include '*.json' '*.safetensors' '*.model'"
        " 'merges.txt' --local-dir FOLDER, and name that folder; weights of another format are converted by"
        " transformers' save_pretrained"
    )


@contextmanager
def _one_at_a_time(cache: Path, name: HubName) -> Iterator[None]:
    """Others of this machine that fetch the same wait here, however long that takes."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f".megalite-{name.repository.replace('/', '--')}.lock").open("wb")
    except OSError:  # a cache that can only be read
        yield
        return
    with lock:
        with suppress(OSError):  # a file system without locks: then each asks for itself
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
