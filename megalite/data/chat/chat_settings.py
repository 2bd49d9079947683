"""The settings by which conversations become tokens: made from a run's, and compared with those of prepared files."""

from pathlib import Path
from typing import Literal

from megalite.config.sections.text_sections import DataConfig
from megalite.data.chat.chat_template import TrainOn, load_chat_template
from megalite.data.chat.conversation_encoding import ChatEncoding, TooLong
from megalite.data.files.prepared import PreparedFacts
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import DataError


def chat_encoding(
    tokenizer: Tokenizer,
    template: str | None,
    train_on: TrainOn,
    sequence_length: int,
    too_long: TooLong,
    *,
    kind: Literal["instruct", "preference"] = "instruct",
) -> ChatEncoding:
    """Return how conversations are encoded. template: tokenizer.chat_template. Raises DataError for an unknown one."""
    loaded = load_chat_template(tokenizer.file.parent, template, tokenizer.end_of_document)
    return ChatEncoding(loaded, train_on, sequence_length, too_long, kind)


def require_same_chat(
    prefix: Path, facts: PreparedFacts, tokenizer: Tokenizer | None, template: str | None, data: DataConfig
) -> None:
    """Raise DataError if prepared conversations have other trained tokens or another chat template than the run.

    template: tokenizer.chat_template. Files of earlier versions, which record neither, pass.
    """
    if facts.train_on and facts.train_on != data.train_on:
        raise DataError(
            f"{prefix} was prepared with train_on = {facts.train_on!r}, and data.train_on is {data.train_on!r}; "
            f'set data.train_on = "{facts.train_on}", or prepare the conversations again'
        )
    if not facts.chat_template_sha256 or tokenizer is None:
        return
    try:
        ours = load_chat_template(tokenizer.file.parent, template, tokenizer.end_of_document)
    except DataError:
        if template is not None:
            raise
        used = "the tokenizer of the run has none"  # the default is the tokenizer's own
    else:
        if ours.sha256 == facts.chat_template_sha256:
            return
        used = f"that of the run is {ours.origin}"
    raise DataError(
        f"{prefix} was prepared with the chat template {facts.chat_template}, and {used}; set tokenizer.chat_template "
        "to the template of the file, or prepare the conversations again"
    )
