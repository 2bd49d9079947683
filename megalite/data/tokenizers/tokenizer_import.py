"""Imports tokenizers without a tokenizer.json: sentencepiece models, and GPT-2's vocab.json with merges.txt."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from megalite.data.tokenizers.sentencepiece_model import (
    convert_sentencepiece,
    read_sentencepiece,
    special_tokens,
)
from megalite.data.tokenizers.tokenizer import (
    END_OF_DOCUMENT,
    SENTENCEPIECE_FILE,
    copy_tokenizer,
    load_tokenizer,
    save_tokenizer,
    tokenizer_file,
    unknown_end_of_document,
)
from megalite.errors import DataError

_GPT2_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast")


@dataclass(frozen=True)
class ForeignTokenizer:
    """A tokenizer in another format, and the files that it consists of."""

    files: tuple[Path, ...]
    _convert: Callable[[tuple[Path, ...], Path, str], None]
    _end: Callable[[tuple[Path, ...]], str | None]

    def fingerprint(self) -> str:
        """Return a hash of the files."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(_read(file))
        return digest.hexdigest()

    @property
    def end_of_document(self) -> str:
        """The end-of-text token of the tokenizer, else END_OF_DOCUMENT."""
        return self._end(self.files) or END_OF_DOCUMENT

    def write_into(self, folder: Path, end_of_document: str) -> None:
        """Write tokenizer.json and tokenizer_config.json.

        Raises DataError if these cannot give the same ids, or the tokenizer has no token `end_of_document`.
        """
        self._convert(self.files, folder, end_of_document)


def foreign_tokenizer(path: Path) -> ForeignTokenizer | None:
    """Return the tokenizer of a file or folder without a tokenizer.json; None if it has one, or no known format.

    Raises DataError for a .vocab without its .model, which has the rules for splitting a text.
    """
    path = path.expanduser()
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return None
        if (path / SENTENCEPIECE_FILE).is_file():
            path /= SENTENCEPIECE_FILE
        elif (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return ForeignTokenizer((path / "vocab.json", path / "merges.txt"), _convert_gpt2, _gpt2_end)
        else:
            models = sorted(path.glob("*.model"))
            if len(models) != 1:
                return None
            [path] = models
    if path.suffix == ".vocab" and path.is_file():
        if not path.with_suffix(".model").is_file():
            raise DataError(
                f"{path} has the pieces only, and there is no {path.with_suffix('.model').name} beside it; "
                "name the sentencepiece .model"
            )
        path = path.with_suffix(".model")
    if path.suffix != ".model":
        return None
    return ForeignTokenizer((path,), _convert_sentencepiece, _sentencepiece_end)


def import_tokenizer(path: Path, folder: Path, end_of_document: str | None = None) -> None:
    """Write the tokenizer of `path`, in any known format, as a folder for AutoTokenizer and `load_tokenizer`.

    end_of_document: None: the one that the tokenizer names.
    """
    foreign = foreign_tokenizer(path)
    if foreign is not None:
        foreign.write_into(folder, end_of_document or foreign.end_of_document)
        return
    file = tokenizer_file(path)
    tokenizer = load_tokenizer(file, end_of_document=end_of_document)
    if (file.parent / "tokenizer_config.json").is_file():
        copy_tokenizer(file.parent, folder)
    else:
        save_tokenizer(tokenizer.backend, folder, tokenizer.end_of_document)


def _sentencepiece_end(files: tuple[Path, ...]) -> str | None:
    [file] = files
    return special_tokens(read_sentencepiece(file)).get("eos_token")


def _gpt2_end(files: tuple[Path, ...]) -> str | None:
    config = files[0].with_name("tokenizer_config.json")
    token = _json(config).get("eos_token") if config.is_file() else None
    return token if isinstance(token, str) else None


def _convert_sentencepiece(files: tuple[Path, ...], folder: Path, end_of_document: str) -> None:
    [file] = files
    model = read_sentencepiece(file)
    backend = convert_sentencepiece(model, str(file))
    if backend.token_to_id(end_of_document) is None:
        raise DataError(unknown_end_of_document(file, backend, end_of_document))
    named = special_tokens(model)
    save_tokenizer(backend, folder, end_of_document, special_tokens=named, sentencepiece=model)


def _convert_gpt2(files: tuple[Path, ...], folder: Path, end_of_document: str) -> None:
    vocabulary, merges = files
    config = vocabulary.with_name("tokenizer_config.json")
    kind = _json(config).get("tokenizer_class") if config.is_file() else None
    if kind not in _GPT2_CLASSES:
        raise DataError(
            f"{vocabulary.parent} holds the vocabulary of a {kind} without a tokenizer.json; only GPT-2's needs none; "
            "write its tokenizer.json with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    ids = _json(vocabulary)
    if end_of_document not in ids:
        raise DataError(
            f"{vocabulary} has no token {end_of_document!r}; "
            "set tokenizer.end_of_document (--end-of-document) to the one that ends a text"
        )
    try:
        lines = _read(merges).decode().splitlines()
        pairs = [(left, right) for left, right in map(str.split, lines) if left != "#version:"]
        backend = Backend(models.BPE(ids, pairs))
    except Exception as error:  # tokenizers raises a bare Exception for whatever is wrong with the files
        raise DataError(
            f"{merges} and {vocabulary.name} do not fit each other ({error}); copy both again"
        ) from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(end_of_document, special=True, normalized=False)])
    save_tokenizer(backend, folder, end_of_document)


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON ({error}); copy or download it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a JSON object; copy or download it again")
    return content


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); check its permissions") from error
