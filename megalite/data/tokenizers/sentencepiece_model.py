"""Converts a sentencepiece model to a `tokenizers` pipeline with the same ids, checked on difficult texts.

The model file is parsed by a small reader of protobuf's wire format: sentencepiece's needs the protobuf package.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from megalite.errors import DataError

SPACE = "▁"  # how a space is written in a piece

# One text for each way in which implementations have been seen to differ.
PROBE_TEXTS = (
    "",
    " ",
    "   ",
    "\n",
    "Once upon a time",
    " starts with a space",
    "  starts with two",
    "ends with a space ",
    "ends with two  ",
    "several   spaces    between     words",
    "lines\n\nand\r\n  indented\n\tby a tab\t\t",
    "\n starts with a line",
    "digits 1234567890 3.14 -7 1,000,000",
    "non-BMP 🙂\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001d518\U0001d52b\U0001d526 \U00013080",
    "combining e\u0301 n\u0303 o\u0308 a\u0323\u0302 \ufb01 \u00c5",
    "das Maß, naïve, Жжёт, 每个阶段, こんにちは, 한국어, العربية, हिन्दी",
    "full\u3000width\u00a0and\u2009thin\u200b none",
    "def f(x):\n    return {'a': x[0] ** 2}  # <tag> &amp; \\n",
    "aaaaaaaaaaaa bbbbbbb ababababab ......... ------ ======",
    "control \x01\x7f\u0085 characters",
)


class PieceType(IntEnum):
    """The type of a piece, with sentencepiece's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class SentencePieceModel:
    """The fields of a model file that decide about ids, with the defaults of sentencepiece_model.proto."""

    pieces: tuple[tuple[str, float, PieceType], ...]
    algorithm: int = 1  # 1 unigram, 2 BPE, 3 words, 4 characters
    byte_fallback: bool = False
    space_is_suffix: bool = False
    normalization: str = ""
    normalization_map: bytes = b""
    adds_prefix: bool = True
    removes_extra_spaces: bool = True
    escapes_spaces: bool = True

    @classmethod
    def parse(cls, data: bytes) -> "SentencePieceModel":
        """Parse the content of a model file; ValueError if it is not one."""
        pieces, trainer, normalizer = [], {}, {}
        try:
            for number, value in _fields(data):
                if number == 1:
                    pieces.append(_piece(_table(value)))
                elif number == 2:
                    trainer = _table(value)
                elif number == 3:
                    normalizer = _table(value)
        except (IndexError, struct.error, TypeError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from error
        if not pieces:
            raise ValueError("it has no pieces")
        return cls(
            tuple(pieces),
            algorithm=_number(trainer, 3, 1),
            byte_fallback=bool(_number(trainer, 35, 0)),
            space_is_suffix=bool(_number(trainer, 24, 0)),
            normalization=_text(normalizer, 1).decode(),
            normalization_map=_text(normalizer, 2),
            adds_prefix=bool(_number(normalizer, 3, 1)),
            removes_extra_spaces=bool(_number(normalizer, 4, 1)),
            escapes_spaces=bool(_number(normalizer, 5, 1)),
        )

    def of_type(self, *types: PieceType) -> list[str]:
        """Return the pieces of these types."""
        return [piece for piece, _, kind in self.pieces if kind in types]

    @cached_property
    def words_are_separate(self) -> bool:
        """Whether no piece continues after a space: each word can then be encoded and cached separately."""
        usable = self.of_type(PieceType.NORMAL, PieceType.USER_DEFINED)
        return not any(re.search(f"[^{SPACE}]{SPACE}", piece) for piece in usable)


def read_sentencepiece(file: Path) -> bytes:
    """Return the content of a model file; DataError if it cannot be read or is not a model."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{file} cannot be read ({error.strerror}); check its path and permissions"
        ) from error
    try:
        SentencePieceModel.parse(data)
    except ValueError as error:
        raise DataError(
            f"{file} is not a sentencepiece model ({error}); copy or download it again"
        ) from error
    return data


def convert_sentencepiece(data: bytes, name: str) -> Backend:
    """Return the `tokenizers` pipeline of a model, with sentencepiece's ids for PROBE_TEXTS and the user's symbols.

    Only text that spells a control symbol differs: `tokenizers` encodes it as the symbol.
    name: the model's name in messages. Raises DataError if `tokenizers` lacks a feature of the model, or ids differ.
    """
    model = SentencePieceModel.parse(data)
    lacking = _lacking(model)
    if lacking:
        raise DataError(f"{name} {lacking}, which a tokenizer.json cannot do; {_ANOTHER}")
    backend, processor = _backend(model), SentencePieceProcessor(model_proto=data)
    for text in (*PROBE_TEXTS, *_symbol_probes(model)):
        ours = backend.encode(text, add_special_tokens=False).ids
        theirs = processor.encode(text)
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), 0)
            raise DataError(
                f"{name}: a tokenizer.json made of it gives other ids than sentencepiece for {text[:60]!r} "
                f"({ours[at : at + 5]} instead of {theirs[at : at + 5]}, from token {at} on); {_ANOTHER}"
            )
    return backend


def special_tokens(data: bytes) -> dict[str, str]:
    """Return the special tokens by transformers' names: unk_token, bos_token, eos_token, pad_token."""
    processor = SentencePieceProcessor(model_proto=data)
    ids = {
        "unk_token": processor.unk_id(),
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "pad_token": processor.pad_id(),
    }
    return {name: processor.id_to_piece(index) for name, index in ids.items() if index >= 0}


_ANOTHER = "use another tokenizer, or train one (megalite tokenizer train)"


def _lacking(model: SentencePieceModel) -> str:
    if model.algorithm not in (1, 2):
        return "splits into whole words or characters"
    if model.space_is_suffix:
        return "writes spaces behind words (treat_whitespace_as_suffix)"
    if not model.escapes_spaces:
        return "leaves spaces as they are (escape_whitespaces = false)"
    if model.of_type(PieceType.UNUSED):
        return "has pieces marked as unused"
    return ""


def _backend(model: SentencePieceModel) -> Backend:
    unigram = model.algorithm == 1
    backend = Backend(_unigram(model) if unigram else _bpe(model))
    backend.normalizer = _normalizer(model)
    cuts: list[pre_tokenizers.PreTokenizer] = []
    symbols = sorted(model.of_type(PieceType.USER_DEFINED), key=len, reverse=True)
    if symbols and not unigram:
        cuts.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, symbols))), behavior="isolated"))
    if model.words_are_separate:
        cuts.append(pre_tokenizers.Split(Regex(f"{SPACE}+"), behavior="merged_with_next"))
    if symbols or unigram:
        cuts.append(pre_tokenizers.Split(Regex(_inside_reserved(model)), behavior="merged_with_previous"))
    if cuts:
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    strip = [decoders.Strip(" ", 1, 0)] if model.adds_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    reserved = model.of_type(PieceType.CONTROL, PieceType.UNKNOWN)
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in reserved])
    return backend


def _normalizer(model: SentencePieceModel) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if "nfkc" in model.normalization:
        # Precompiled ignores a character with combining marks of six bytes or more in all.
        steps.append(normalizers.NFC())
    if model.normalization_map:
        steps.append(normalizers.Precompiled(model.normalization_map))
    if model.removes_extra_spaces:
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.adds_prefix:
        # Metaspace would add no prefix to a text that begins with a space.
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _unigram(model: SentencePieceModel) -> models.Model:
    highest = max(score for _, score, kind in model.pieces if kind is PieceType.NORMAL)
    vocabulary = []
    lowest = min(score for _, score, kind in model.pieces if kind is PieceType.NORMAL)
    for piece, score, kind in model.pieces:
        if kind is PieceType.USER_DEFINED:
            score = len(piece) * highest - 0.1  # as in unigram_model.cc: always chosen
        elif kind is not PieceType.NORMAL:
            score = lowest  # never reached; a lower one would change the price of an unknown character
        vocabulary.append((piece, score))
    unknown = next(index for index, (_, _, kind) in enumerate(model.pieces) if kind is PieceType.UNKNOWN)
    return models.Unigram(vocabulary, unknown, model.byte_fallback)


def _inside_reserved(model: SentencePieceModel) -> str:
    """Return a pattern for the first part of each control symbol and byte piece, if the second part follows.

    `tokenizers` treats these as ordinary pieces; splitting a word inside of one prevents a match. The split is where no
    piece and no sequence of unknown characters can cross, if the symbol has such a place.
    """
    normal = model.of_type(PieceType.NORMAL)
    joints = {piece[at : at + 2] for piece in normal for at in range(len(piece) - 1)}
    known = {piece for piece in normal if len(piece) == 1}
    patterns = []
    for symbol in model.of_type(PieceType.CONTROL, PieceType.UNKNOWN):
        pairs = [symbol[at : at + 2] for at in range(len(symbol) - 1)]
        free = [at for at, pair in enumerate(pairs, start=1) if pair not in joints and known & set(pair)]
        at = free[0] if free else 1
        patterns.append(f"{re.escape(symbol[:at])}(?={re.escape(symbol[at:])})")
    if model.of_type(PieceType.BYTE):
        patterns.append("<(?=0x[0-9A-F]{2}>)" if "<0" not in joints else "<0(?=x[0-9A-F]{2}>)")
    return "|".join(patterns)


def _bpe(model: SentencePieceModel) -> models.Model:
    scores = {piece: score for piece, score, kind in model.pieces if kind is PieceType.NORMAL}
    ids = {piece: index for index, (piece, _, _) in enumerate(model.pieces)}
    merges = []
    for piece, score in scores.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in scores and right in scores:
                merges.append((-score, ids[left], ids[right], left, right))
    [unknown] = model.of_type(PieceType.UNKNOWN)
    return models.BPE(
        ids,
        [(left, right) for *_, left, right in sorted(merges)],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        # A user-defined symbol is one token, although no merges produce it.
        ignore_merges=bool(model.of_type(PieceType.USER_DEFINED)),
    )


def _symbol_probes(model: SentencePieceModel) -> Iterator[str]:
    """Yield texts with the user-defined symbols, and with the longest and the least likely pieces."""
    for symbol in model.of_type(PieceType.USER_DEFINED):
        plain = symbol.replace(SPACE, " ")
        yield from (plain, f"a{plain}b", f" a {plain} b{plain}{plain}")
    normal = [piece.replace(SPACE, " ") for piece in model.of_type(PieceType.NORMAL)]
    yield " ".join(normal[-50:])
    yield "".join(sorted(normal, key=len)[-50:])


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field of a message, https://protobuf.dev/programming-guides/encoding."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(data, at)
        else:
            if kind == 2:
                size, at = _varint(data, at)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise ValueError(f"byte {at} starts no field")
            value = data[at : at + size]
            at += size
            if at > len(data):
                raise ValueError("it ends within a field")
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _table(message: int | bytes) -> dict[int, int | bytes]:
    if isinstance(message, int):
        raise ValueError("a number stands where a message should")
    return dict(_fields(message))


def _number(table: dict[int, int | bytes], field: int, default: int) -> int:
    value = table.get(field, default)
    if isinstance(value, bytes):
        raise ValueError(f"field {field} is not a number")
    return value


def _text(table: dict[int, int | bytes], field: int) -> bytes:
    value = table.get(field, b"")
    if isinstance(value, int):
        raise ValueError(f"field {field} is not text")
    return value


def _piece(table: dict[int, int | bytes]) -> tuple[str, float, PieceType]:
    [score] = struct.unpack("<f", _text(table, 2)) if 2 in table else [0.0]
    return _text(table, 1).decode(), score, PieceType(_number(table, 3, 1))
