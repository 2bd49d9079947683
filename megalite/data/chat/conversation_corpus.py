"""Conversations of instruction data, and pairs of preference data, as the documents of a corpus."""

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.data.chat.conversation import Conversation, Form, conversation, form_of
from megalite.data.chat.preference import Pair, preference_pair
from megalite.data.text.corpus import Corpus, DocumentPiece
from megalite.data.text.records import records
from megalite.data.text.source_files import SourceFile


@dataclass(frozen=True, kw_only=True)
class ConversationPiece(DocumentPiece):
    """A whole conversation; text: its contents, for its size."""

    conversation: Conversation


@dataclass(frozen=True, kw_only=True)
class PairPiece(DocumentPiece):
    """The two conversations of a pair; text: the contents of both, for its size."""

    pair: Pair


class ConversationCorpus(Corpus):
    """A corpus whose documents are conversations, one a row of its files."""

    def documents(self, file: SourceFile) -> Iterator[tuple[DocumentPiece, int]]:
        form: Form | None = None
        for row, where, position in records(file):
            form = form or form_of(row, where)
            talk = conversation(row, form, where)
            yield (
                ConversationPiece(
                    text=_text(talk), ends_document=True, unused=talk.unused, conversation=talk
                ),
                position,
            )


class PairCorpus(Corpus):
    """A corpus whose documents are pairs of conversations, one pair a row of its files."""

    def documents(self, file: SourceFile) -> Iterator[tuple[DocumentPiece, int]]:
        for row, where, position in records(file):
            pair = preference_pair(row, where)
            text = "\n".join(map(_text, pair.conversations))
            yield PairPiece(text=text, ends_document=True, unused=pair.unused, pair=pair), position


def _text(conversation: Conversation) -> str:
    return "\n".join(str(message.get("content") or "") for message in conversation.messages)


CORPUS_OF: dict[str, type[Corpus]] = {
    "text": Corpus,
    "instruct": ConversationCorpus,
    "preference": PairCorpus,
}
"""data.kind -> what reads the sources."""
