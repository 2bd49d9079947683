"""Encodes a corpus batch by batch, in worker processes: text, or conversations."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.chat.conversation import Conversation
from megalite.data.chat.conversation_corpus import ConversationPiece, PairPiece
from megalite.data.chat.conversation_encoding import ChatEncoding, encode_conversation, encode_pair
from megalite.data.files.token_file import token_dtype
from megalite.data.text.corpus import Corpus, DocumentPiece, Place
from megalite.data.text.row_counts import RowCounts
from megalite.data.tokenizers.encoding import PieceEncoder
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer

# Characters per item of work: enough to hide the cost of the pipe, few enough to keep all workers busy.
_BATCH_CHARACTERS = 1 << 19


Batch = tuple[list[DocumentPiece], Place]
"""Consecutive pieces, and the position in the corpus after the last of them."""


@dataclass(frozen=True)
class EncodedBatch:
    """The ids of a batch end to end, the length of each piece in ids, and which pieces end a document.

    A pair of conversations has two pieces, and a conversation may have one for each answer; no split divides them: only
    the last one ends a document.
    """

    tokens: NDArray[Any]
    lengths: list[int]
    ends_document: list[bool]
    too_long: list[bool] | None = None
    """For conversations."""
    counts: RowCounts = field(default_factory=RowCounts)


@dataclass(frozen=True)
class _EncodeText:
    """Encodes batches in a worker process, which loads the tokenizer once."""

    file: Path
    end_of_document: str

    def __call__(self, batch: Batch) -> tuple[EncodedBatch, Place]:
        pieces, place = batch
        encoder, end = self._tools
        lengths, arrays, counts = [], [], RowCounts()
        for piece in pieces:
            if piece.unused is not None:
                counts.add_row(piece.unused)
            ids = encoder.ids(piece)
            arrays += [ids, end] if piece.ends_document else [ids]
            lengths.append(len(ids) + piece.ends_document)
        ends = [piece.ends_document for piece in pieces]
        return EncodedBatch(np.concatenate(arrays), lengths, ends, counts=counts), place

    @cached_property
    def _tools(self) -> tuple[PieceEncoder, NDArray[Any]]:
        tokenizer = load_tokenizer(self.file, end_of_document=self.end_of_document)
        dtype = token_dtype(tokenizer.vocab_size)
        return PieceEncoder(tokenizer, dtype), np.array([tokenizer.end_of_document_id], dtype=dtype)


@dataclass(frozen=True)
class _EncodeConversations:
    """Encodes batches of conversations in a worker process, which loads the tokenizer once."""

    file: Path
    end_of_document: str
    chat: ChatEncoding

    def __call__(self, batch: Batch) -> tuple[EncodedBatch, Place]:
        pieces, place = batch
        arrays, too_long, ends, counts = [], [], [], RowCounts()
        for piece in pieces:
            conversations: Sequence[Conversation]
            if isinstance(piece, PairPiece):
                conversations = piece.pair.conversations
                both, long = encode_pair(piece.pair, self.chat, self._tokenizer)
                encoded = list(zip(both, long, strict=True))
            else:
                assert isinstance(piece, ConversationPiece)
                conversations = [piece.conversation]
                encoded = encode_conversation(piece.conversation, self.chat, self._tokenizer)
                counts.more_samples += len(encoded) - 1
            arrays += [tokens for tokens, _ in encoded]
            too_long += [long for _, long in encoded]
            ends += [False] * (len(encoded) - 1) + [True]
            counts.add_row(piece.unused or ())
            for conversation in conversations:
                counts.add_messages(self.chat.template.unused_keys(conversation))
        lengths = [len(tokens) for tokens in arrays]
        return EncodedBatch(np.concatenate(arrays), lengths, ends, too_long, counts), place

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.file, end_of_document=self.end_of_document)


def batch_encoder(
    tokenizer: Tokenizer, chat: ChatEncoding | None
) -> Callable[[Batch], tuple[EncodedBatch, Place]]:
    """Return what encodes a batch, in any process, and hands its place on. chat: how conversations are encoded."""
    origin = tokenizer.file, tokenizer.end_of_document
    return _EncodeText(*origin) if chat is None else _EncodeConversations(*origin, chat)


def batches(corpus: Corpus, after: Place) -> Iterator[Batch]:
    """Yield the documents of a corpus behind a place in batches of about _BATCH_CHARACTERS."""
    pieces: list[DocumentPiece] = []
    characters, place = 0, after
    for piece, place in corpus.pieces(after):
        pieces.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield pieces, place
            pieces, characters = [], 0
    if pieces:
        yield pieces, place
