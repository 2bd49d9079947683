"""Byte-level BPE: training, and any tokenizer.json of Hugging Face; transformers' AutoTokenizer gives the same ids."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from megalite.data.corpus import Piece
from megalite.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
# Text that training looks at; more changes the merges of a 16k vocabulary hardly, and the time a lot.
SAMPLE_CHARACTERS = 1 << 26
_BYTES = 256


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer.

    file: the tokenizer.json. vocab_size: one above the largest id. sha256: of the file, to tell tokenizers apart.
    """

    file: Path
    backend: Backend
    vocab_size: int
    end_of_document: str
    end_of_document_id: int
    sha256: str

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, special tokens in it included, none added."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def train_tokenizer(
    pieces: Iterable[Piece],
    vocab_size: int,
    *,
    end_of_document: str = END_OF_DOCUMENT,
    sample_characters: int = SAMPLE_CHARACTERS,
) -> Backend:
    """A byte-level BPE of exactly `vocab_size` ids: the end of a document is id 0, then the bytes, then merges.

    The same pieces give the same tokenizer. Of a long text about `sample_characters` are used, evenly spaced.
    Raises DataError when `vocab_size` cannot be reached.
    """
    smallest = _BYTES + 1
    if vocab_size < smallest:
        raise DataError(
            f"vocabulary size {vocab_size} has no room for {_BYTES} bytes and {end_of_document!r}; "
            f"use at least {smallest}"
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(end_of_document, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = evenly_spaced(pieces, sample_characters)
    if not sample:
        raise DataError("the source has no text; name one that has")
    backend.train_from_iterator(sample, trainer)
    reached = backend.get_vocab_size()
    if reached != vocab_size:
        raise DataError(
            f"the text has words for a vocabulary of {reached} only, not {vocab_size}; "
            f"set tokenizer.vocab_size (--vocab-size) to {reached} or less, or add text"
        )
    return backend


def evenly_spaced(pieces: Iterable[Piece], characters: int) -> list[str]:
    """Every n-th piece, n the smallest power of two that keeps at most `characters` (one piece at least).

    One pass, and never more than that and a piece in memory.
    """
    kept: list[str] = []
    total, stride = 0, 1
    for index, piece in enumerate(pieces):
        if index % stride:
            continue
        kept.append(piece.text)
        total += len(piece.text)
        while total > characters and len(kept) > 1:
            kept = kept[::2]
            total, stride = sum(map(len, kept)), stride * 2
    return kept


def save_tokenizer(backend: Backend, folder: Path, end_of_document: str = END_OF_DOCUMENT) -> None:
    """Write tokenizer.json and tokenizer_config.json, each whole or not at all, for AutoTokenizer and for us."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_document,
        "eos_token": end_of_document,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),  # transformers' own word for "no limit"
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # tokenizer.json last: where it stands, the folder is whole.
        _write(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        _write(folder / "tokenizer.json", backend.to_str(pretty=True) + "\n")
    except OSError as error:
        raise DataError(
            f"{error.filename or folder} cannot be written ({error.strerror}); free space or choose another folder"
        ) from error


def load_tokenizer(path: Path | str, *, end_of_document: str = END_OF_DOCUMENT) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, or of a tokenizer.json itself.

    Raises DataError when there is none, or when it does not know `end_of_document`.
    """
    file = tokenizer_file(Path(path))
    try:
        text = file.read_bytes()
        backend = Backend.from_str(text.decode())
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); check its permissions") from error
    except Exception as error:  # tokenizers raises a bare Exception for whatever is wrong with the JSON
        raise DataError(f"{file} is not a tokenizer ({error}); save it again with save_pretrained") from error
    # A file may ask for either; documents are never shortened or filled up.
    backend.no_truncation()
    backend.no_padding()
    end_of_document_id = backend.token_to_id(end_of_document)
    if end_of_document_id is None:
        raise DataError(_unknown_end_of_document(file, backend, end_of_document))
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    sha256 = hashlib.sha256(text).hexdigest()
    return Tokenizer(file, backend, vocab_size, end_of_document, end_of_document_id, sha256)


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json that `path`, a folder or the file itself, stands for; DataError when there is none."""
    path = path.expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return file
    if not path.exists():
        raise DataError(
            f"tokenizer {path} does not exist; name a Hugging Face folder, or train one (megalite tokenizer train)"
        )
    others = sorted(entry.name for entry in path.iterdir())
    raise DataError(
        f"{path} has no tokenizer.json (it has {others}); "
        "write one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def _unknown_end_of_document(file: Path, backend: Backend, wanted: str) -> str:
    special = sorted(token.content for token in backend.get_added_tokens_decoder().values() if token.special)
    return (
        f"{file} has no token {wanted!r}; "
        f"set tokenizer.end_of_document (--end-of-document) to the one that ends a text, one of {special}"
    )


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
