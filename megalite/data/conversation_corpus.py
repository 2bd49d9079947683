"""Conversations of instruction data, as the documents of a corpus."""

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.data.conversation import Conversation, Form, conversation, form_of
from megalite.data.corpus import Corpus, Piece
from megalite.data.records import records
from megalite.data.source_files import SourceFile


@dataclass(frozen=True, kw_only=True)
class ConversationPiece(Piece):
    """A whole conversation; text: its contents, for its size."""

    conversation: Conversation


class ConversationCorpus(Corpus):
    """A corpus whose documents are conversations, one a row of its files."""

    def documents(self, file: SourceFile) -> Iterator[tuple[Piece, int]]:
        form: Form | None = None
        for row, where, position in records(file):
            form = form or form_of(row, where)
            found = conversation(row, form, where)
            text = "\n".join(str(message.get("content") or "") for message in found.messages)
            yield ConversationPiece(text=text, ends_document=True, conversation=found), position


CORPUS_OF: dict[str, type[Corpus]] = {"text": Corpus, "instruct": ConversationCorpus}
"""data.kind -> what reads the sources."""
