"""Loads any Hugging Face tokenizer.json, and writes folders from which AutoTokenizer gives the same ids."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from megalite.data.files.partial_files import as_json, lock_held, partial, replace_file
from megalite.errors import DataError, closest_path, write_remedy

END_OF_DOCUMENT = "<|endoftext|>"
SENTENCEPIECE_FILE = "tokenizer.model"
# The files of a tokenizer folder, by the names that transformers looks for.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    SENTENCEPIECE_FILE,
)
# The transformers class that uses tokenizer.json unchanged.
_AS_WRITTEN = "PreTrainedTokenizerFast"


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer.

    file: the tokenizer.json. vocab_size: the largest id + 1. sha256: of the file, identifies the tokenizer.
    """

    file: Path
    backend: Backend
    vocab_size: int
    end_of_document: str
    end_of_document_id: int
    sha256: str

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens in the text get their ids, none are added."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def save_tokenizer(
    backend: Backend,
    folder: Path,
    end_of_document: str = END_OF_DOCUMENT,
    *,
    special_tokens: Mapping[str, str] | None = None,
    sentencepiece: bytes | None = None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json, each atomically, for AutoTokenizer and `load_tokenizer`.

    Raises DataError while another process writes a tokenizer there.

    special_tokens: additional special tokens, by transformers' names. sentencepiece: the model that `backend` was made
    from, also written as tokenizer.model for other programs; AutoTokenizer does not read it.
    """
    config = {
        **{"bos_token": end_of_document, **(special_tokens or {}), "eos_token": end_of_document},
        "tokenizer_class": _AS_WRITTEN,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),  # transformers' value for "no limit"
    }
    with _writing(folder):
        # tokenizer.json is last: if it exists, the folder is complete.
        if sentencepiece is not None:
            replace_file(folder / SENTENCEPIECE_FILE, sentencepiece)
        replace_file(folder / "tokenizer_config.json", as_json(config))
        replace_file(folder / "tokenizer.json", backend.to_str(pretty=True).encode() + b"\n")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer of a Hugging Face folder so that AutoTokenizer uses tokenizer.json unchanged.

    For a class such as LlamaTokenizer, transformers 5 builds a new pipeline from the vocabulary, which gives other ids
    for a text that begins with a space.
    """
    with _writing(folder):
        present = (name for name in TOKENIZER_FILES if (source / name).is_file())
        contents = {name: (source / name).read_bytes() for name in present}
        config = _config(source / "tokenizer_config.json")
        rebuilding = ("auto_map", "add_prefix_space", "legacy", "tokenizer_file", "vocab_file", "merges_file")
        kept = {key: value for key, value in config.items() if key not in rebuilding}
        contents["tokenizer_config.json"] = as_json({**kept, "tokenizer_class": _AS_WRITTEN})
        # tokenizer.json is last: if it exists, the folder is complete.
        for name in sorted(contents, key="tokenizer.json".__eq__):
            replace_file(folder / name, contents[name])


def add_special_tokens(folder: Path, tokens: Sequence[str]) -> None:
    """Add special tokens behind the ids of the tokenizer in `folder`; those that the tokenizer has stay as they are."""
    with _writing(folder):
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in tokens])
        replace_file(folder / "tokenizer.json", backend.to_str(pretty=True).encode() + b"\n")


def copy_others(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files beside `source`, a tokenizer.json or its folder, that `folder` lacks."""
    beside = source if source.is_dir() else source.parent
    with _writing(folder):
        for name in TOKENIZER_FILES:
            if (beside / name).is_file() and not (folder / name).exists():
                replace_file(folder / name, (beside / name).read_bytes())


def load_tokenizer(path: Path | str, *, end_of_document: str | None = None) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder, or a tokenizer.json.

    end_of_document: None: the eos_token of the folder, else END_OF_DOCUMENT.
    Raises DataError if there is no tokenizer, or it has no token `end_of_document`.
    """
    file = tokenizer_file(Path(path))
    try:
        text = file.read_bytes()
        backend = Backend.from_str(text.decode())
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); check its permissions") from error
    except Exception as error:  # tokenizers raises a bare Exception for whatever is wrong with the JSON
        raise DataError(f"{file} is not a tokenizer ({error}); save it again with save_pretrained") from error
    # The file may ask for truncation and padding, which would change documents.
    backend.no_truncation()
    backend.no_padding()
    end_of_document = end_of_document or special_token(file.parent, "eos_token") or END_OF_DOCUMENT
    end_of_document_id = backend.token_to_id(end_of_document)
    if end_of_document_id is None:
        raise DataError(unknown_end_of_document(file, backend, end_of_document))
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    sha256 = hashlib.sha256(text).hexdigest()
    return Tokenizer(file, backend, vocab_size, end_of_document, end_of_document_id, sha256)


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of `path`, a folder or the file itself; DataError if it does not exist."""
    path = path.expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return file
    if not path.exists():
        close = closest_path(path)
        remedy = "name a Hugging Face folder, or train one (megalite tokenizer train)"
        raise DataError(
            f"tokenizer {path} does not exist; {f'did you mean {close}?' if close else remedy}",
            key="--tokenizer",
            set={"--tokenizer": close} if close else {},
            value=str(path),
        )
    others = sorted(entry.name for entry in path.iterdir())
    raise DataError(
        f"{path} has no tokenizer.json (it has {others}); "
        "write one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def start_token_id(tokenizer: Tokenizer) -> int:
    """Return the id in front of a text whose first token is predicted: of bos_token, else of the end of document."""
    start = special_token(tokenizer.file.parent, "bos_token")
    number = None if start is None else tokenizer.backend.token_to_id(start)
    return tokenizer.end_of_document_id if number is None else int(number)


def special_token(folder: Path, key: str) -> str | None:
    """Return the text of a special token, such as eos_token, of a Hugging Face folder; None without it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            token = _config(folder / name).get(key)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str) and content:
                return content
    return None


def unknown_end_of_document(file: Path, backend: Backend, end_of_document: str) -> str:
    """Return the message of a tokenizer that lacks the end of document."""
    special = sorted(token.content for token in backend.get_added_tokens_decoder().values() if token.special)
    return (
        f"{file} has no token {end_of_document!r}; "
        f"set tokenizer.end_of_document (--end-of-document) to the one that ends a text, one of {special}"
    )


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The file that is renamed last: whoever holds its lock may write all of them.
        with lock_held(partial(folder / "tokenizer.json")):
            yield
    except OSError as error:
        another, full = "choose another folder", "free space or choose another folder"
        remedy = write_remedy(error, full=full, forbidden=another) or full
        raise DataError(
            f"{error.filename or folder} cannot be written ({error.strerror}); {remedy}"
        ) from error


def _config(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not a tokenizer's configuration ({error}); save it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a JSON object; save it again with save_pretrained")
    return content
