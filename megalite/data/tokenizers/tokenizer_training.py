"""Trains byte-level BPE and sentencepiece's unigram and BPE tokenizers, deterministically."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from math import log2, sqrt
from pathlib import Path

from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from megalite.data.text.corpus import DocumentPiece
from megalite.data.tokenizers.sentencepiece_model import convert_sentencepiece, special_tokens
from megalite.data.tokenizers.tokenizer import END_OF_DOCUMENT, save_tokenizer
from megalite.errors import DataError

# tokenizer.kind -> the model_type of sentencepiece; None: trained by the tokenizers library.
KINDS = {"bpe": None, "unigram": "unigram", "sentencepiece_bpe": "bpe"}

# The sample of the text; more text hardly changes the merges of a 16k vocabulary and takes longer.
SAMPLE_CHARACTERS = 1 << 26
_BYTES = 256
_SMALLEST_VOCABULARY, _LARGEST_VOCABULARY = 512, 32768
# The pieces of every sentencepiece model that we train: the bytes, <unk> and the end of document.
_RESERVED = _BYTES + 2
# The share of characters with their own piece, as in Llama's model; the others are encoded as bytes.
_COVERAGE = 0.99995
# The order of sums in sentencepiece, and so its result, depends on the number of threads.
_THREADS = 4
_LINE_CHARACTERS = 1 << 12
_NO_TEXT = "there is no text to train a tokenizer on; name a source with text (--source, data.source)"


def train_into(
    folder: Path,
    pieces: Iterable[DocumentPiece],
    vocab_size: int,
    *,
    at_most: bool = False,
    kind: str = "bpe",
    end_of_document: str = END_OF_DOCUMENT,
) -> None:
    """Train a tokenizer of one of KINDS and write its folder; the same pieces give the same files.

    at_most: a text with too few words gets fewer ids. Otherwise raises DataError if `vocab_size` cannot be reached.
    """
    algorithm = KINDS[kind]
    if algorithm is None:
        backend = train_bpe(pieces, vocab_size, at_most=at_most, end_of_document=end_of_document)
        save_tokenizer(backend, folder, end_of_document)
    else:
        model = train_sentencepiece(
            pieces, vocab_size, algorithm, at_most=at_most, end_of_document=end_of_document
        )
        backend = convert_sentencepiece(model, f"the {kind} model of this text")
        save_tokenizer(
            backend, folder, end_of_document, special_tokens=special_tokens(model), sentencepiece=model
        )


def train_bpe(
    pieces: Iterable[DocumentPiece],
    vocab_size: int,
    *,
    at_most: bool = False,
    end_of_document: str = END_OF_DOCUMENT,
    sample_characters: int = SAMPLE_CHARACTERS,
) -> Backend:
    """Train a byte-level BPE of exactly `vocab_size` ids: id 0 is the end of document, then bytes, then merges.

    Deterministic. Uses at most about `sample_characters`, evenly spaced over the text.
    at_most: a text with too few words gets fewer ids. Otherwise raises DataError if `vocab_size` cannot be reached.
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
        raise DataError(_NO_TEXT)
    backend.train_from_iterator(sample, trainer)
    reached = backend.get_vocab_size()
    if reached != vocab_size and not at_most:
        raise _too_little_text(reached, vocab_size)
    return backend


def train_sentencepiece(
    pieces: Iterable[DocumentPiece],
    vocab_size: int,
    algorithm: str,
    *,
    at_most: bool = False,
    end_of_document: str = END_OF_DOCUMENT,
    sample_characters: int = SAMPLE_CHARACTERS,
) -> bytes:
    """Train a sentencepiece model of exactly `vocab_size` ids: id 0 is <unk>, id 1 the end of document.

    algorithm: "unigram" or "bpe". Decoding restores every text: the model has no normalization and no prefix, and
    encodes characters without a piece as bytes, newlines among them, because sentencepiece trains on lines.
    at_most: a text with too few words gets fewer ids. Otherwise raises DataError if `vocab_size` cannot be reached.
    """
    smallest = _RESERVED + 1
    if vocab_size < smallest:
        raise DataError(
            f"vocabulary size {vocab_size} has no room for {_BYTES} bytes, <unk>, {end_of_document!r} and a character; "
            f"use at least {smallest}"
        )
    sample = evenly_spaced(pieces, sample_characters)
    characters = Counter[str]()
    for text in sample:
        characters.update(text)
    if not set(characters) - {"\n", "\r"}:
        raise DataError(_NO_TEXT)
    covered = _covered(characters)
    own = min((vocab_size - _RESERVED + 1) // 2, len(covered))
    while True:
        try:
            return _trained(
                _lines(sample, set(characters) - set(covered[:own])), algorithm, vocab_size, end_of_document
            )
        except (RuntimeError, OSError) as error:
            reached = re.search(r"too high .* <= (\d+)", str(error))
            if reached is None:
                raise DataError(
                    f"sentencepiece cannot train on this text ({error}); name another source, or tokenizer.kind = 'bpe'"
                ) from error
            if own == len(covered) and at_most and int(reached[1]) < vocab_size:
                vocab_size = int(reached[1])
                continue
            if own == len(covered):
                raise _too_little_text(int(reached[1]), vocab_size) from error
            # The text has too few words, so there is room for more characters.
            own = min(own + vocab_size - int(reached[1]), len(covered))


def _covered(characters: Counter[str]) -> list[str]:
    """Return the characters that should have their own piece if there is room, the most frequent first."""
    left = _COVERAGE * sum(characters.values())
    covered = []
    for character, count in characters.most_common():
        if left <= 0:
            break
        left -= count
        if character not in "\n\r":
            covered.append(character)
    return covered


def _trained(lines: Iterator[str], algorithm: str, vocab_size: int, end_of_document: str) -> bytes:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type=algorithm,
        vocab_size=vocab_size,
        # `_lines` has removed rare characters already: sentencepiece's minimum of 98 % may be too many characters.
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        eos_piece=end_of_document,
        max_sentence_length=4 * _LINE_CHARACTERS,
        num_threads=_THREADS,
        minloglevel=2,
    )
    return model.getvalue()


def _lines(texts: Iterable[str], rare: set[str]) -> Iterator[str]:
    """Yield the training lines of sentencepiece: text between rare characters, within its length limit."""
    cuts = {ord(character): "\n" for character in rare}
    for text in texts:
        for line in text.translate(cuts).split("\n"):
            for start in range(0, len(line), _LINE_CHARACTERS):
                yield line[start : start + _LINE_CHARACTERS]


def fitting_vocab_size(text_bytes: int) -> int:
    """Return the vocabulary of a tokenizer for a text of this size: the power of two nearest to the square root.

    4,096 ids for 10 MB: each id then occurs about sqrt(bytes) / 4 times, often enough to be learned. 512 to 32768.
    """
    nearest = 1 << round(log2(sqrt(max(1, text_bytes))))
    return min(max(nearest, _SMALLEST_VOCABULARY), _LARGEST_VOCABULARY)


def _too_little_text(reached: int, vocab_size: int) -> DataError:
    return DataError(
        f"the text has words for a vocabulary of {reached} only, not {vocab_size}; "
        f'set tokenizer.vocab_size (--vocab-size) to {reached} or less, or to "auto", or add text'
    )


def evenly_spaced(pieces: Iterable[DocumentPiece], characters: int) -> list[str]:
    """Return every n-th piece, n the smallest power of two that keeps at most `characters`, and at least one piece.

    Takes one pass, and memory for the result and one more piece.
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
