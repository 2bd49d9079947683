"""The ends of a model's text: the end of a document, the ids that its files name, the end of a turn. No torch."""

from dataclasses import dataclass

from megalite.data.chat.chat_template import ChatTemplate, has_chat_template, load_chat_template
from megalite.data.chat.turn_end import marks_in_pieces, turn_end
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.generation.source import ModelSource


@dataclass(frozen=True)
class Stops:
    """ids: tokens that end a text. texts: strings that do, where the chat template's marks have no tokens."""

    ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()


NO_STOPS = Stops()


def stops_of(source: ModelSource, tokenizer: Tokenizer) -> Stops:
    """Return what ends a text of the model.

    A checkpoint of conversations ends where its chat template ends an answer; its export and other Hugging Face folders
    where eos_token_id of generation_config.json says, and at the marks of their chat template that have no tokens.
    """
    document = tokenizer.end_of_document_id
    # A run may have replaced the tokenizer of the weights that it began with.
    is_theirs = source.format != "checkpoint" or document in source.end_ids
    ids = {document, *(each for each in source.end_ids if is_theirs and each < tokenizer.vocab_size)}
    folder = source.tokenizer if source.tokenizer.is_dir() else source.tokenizer.parent
    if source.chat_template is None and not has_chat_template(folder):
        return Stops(frozenset(ids))
    template = load_chat_template(folder, source.chat_template, source.end_of_document or "")
    if not source.of_conversations and not marks_in_pieces(template, tokenizer):
        return Stops(frozenset(ids))
    end = chat_stops(template, tokenizer)
    return Stops(frozenset(ids) | (end.ids if source.of_conversations else frozenset()), end.texts)


def chat_stops(template: ChatTemplate, tokenizer: Tokenizer) -> Stops:
    """Return what ends an answer in the form of a chat template."""
    end = turn_end(template, tokenizer)
    return Stops(end.ids | {tokenizer.end_of_document_id}, (end.text,) if end.in_pieces and end.text else ())
