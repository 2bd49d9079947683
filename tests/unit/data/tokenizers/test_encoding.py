"""A document in pieces gives the ids of the whole, for every kind of tokenizer."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from megalite.data.text.corpus import DocumentPiece, cut_document
from megalite.data.tokenizers.encoding import PieceEncoder
from megalite.data.tokenizers.sentencepiece_model import convert_sentencepiece
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from megalite.data.tokenizers.tokenizer_training import KINDS, train_into
from tests.support.tiny import tiny_corpus
from tests.unit.data.tokenizers.test_sentencepiece_model import VARIANTS, model

TEXT = "".join(tiny_corpus()) + "def f(x):\n    return x\n\n\n  end  of\tit "


def in_pieces(tokenizer: Tokenizer, text: str, limit: int) -> list[int]:
    encoder = PieceEncoder(tokenizer, np.dtype(np.uint16))
    pieces = list(cut_document([text], limit))
    assert len(pieces) > 3
    return [token for piece in pieces for token in encoder.ids(piece)]


def loaded(backend: Backend, folder: Path, end_of_document: str = "</s>") -> Tokenizer:
    save_tokenizer(backend, folder, end_of_document)
    return load_tokenizer(folder, end_of_document=end_of_document)


@pytest.mark.parametrize("kind", list(KINDS))
def test_of_what_we_train(tmp_path: Path, kind: str) -> None:
    train_into(tmp_path, [DocumentPiece(TEXT, ends_document=True)], 280, kind=kind)
    tokenizer = load_tokenizer(tmp_path)
    for limit in (40, 97, 300):
        assert in_pieces(tokenizer, TEXT, limit) == tokenizer.encode(TEXT)


@pytest.mark.parametrize("name", ["llama", "gemma", "t5", "bytes and nfkc", "symbols and a prefix"])
@pytest.mark.parametrize("algorithm", ["unigram", "bpe"])
def test_of_sentencepiece_models_with_and_without_a_prefix(tmp_path: Path, algorithm: str, name: str) -> None:
    tokenizer = loaded(convert_sentencepiece(model(algorithm, **VARIANTS[name]), name), tmp_path)
    # A normalizer that makes one space of several cannot be cut among them, and is not: there is no such place.
    for limit in (40, 97, 300):
        assert in_pieces(tokenizer, TEXT, limit) == tokenizer.encode(TEXT)


def words(
    pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None
) -> Backend:
    characters = sorted({*TEXT, "▁", "Ġ", "Ċ", *pre_tokenizers.ByteLevel.alphabet()})
    backend = Backend(models.BPE({each: index for index, each in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens(["</s>"])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        words(pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
        words(pre_tokenizers.Metaspace(prepend_scheme="first", split=True)),
        words(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        words(
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
            )
        ),
        words(pre_tokenizers.Whitespace(), normalizers.Lowercase()),
        words(
            pre_tokenizers.Digits(),
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        ),
    ],
    ids=["metaspace", "first", "byte level", "sequence", "words", "prepend"],
)
def test_of_other_programs_tokenizers(tmp_path: Path, backend: Backend) -> None:
    tokenizer = loaded(backend, tmp_path)
    for limit in (40, 97, 300):
        assert in_pieces(tokenizer, TEXT, limit) == tokenizer.encode(TEXT)


def test_a_spelled_special_token_is_text_in_every_piece(tmp_path: Path) -> None:
    tokenizer = loaded(convert_sentencepiece(model("unigram", **VARIANTS["llama"]), "llama"), tmp_path)
    text = "a </s> b <s> c <unk> d " * 20
    assert tokenizer.end_of_document_id in tokenizer.encode(text)
    ids = in_pieces(tokenizer, text, 60)
    assert tokenizer.end_of_document_id not in ids
    assert tokenizer.decode(ids) == text
    assert json.loads(tokenizer.file.read_text())["added_tokens"]  # they are special to everyone else


def test_of_real_tokenizers(shared_data: Path) -> None:
    text = (shared_data / "tinyshakespeare" / "input.txt").read_text()[:60_000]
    tokenizer = load_tokenizer(shared_data / "stories260K", end_of_document="</s>")
    assert in_pieces(tokenizer, text, 5000) == tokenizer.encode(text)
