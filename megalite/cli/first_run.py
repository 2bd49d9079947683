"""The starter of a run without RUN.toml: measures the text that --data.source names."""

from collections.abc import Sequence
from pathlib import Path

from megalite.config.first_run import SIZES, Starter
from megalite.config.flags import COMMAND_LINE, apply_overrides
from megalite.config.rules.places import exists, is_prepared, prefix_of
from megalite.config.sections.unchecked import SettingsDraft
from megalite.data.chat.conversation_corpus import CORPUS_OF
from megalite.data.chat.text_size import measure_text
from megalite.data.text.standard_library import STANDARD_LIBRARY
from megalite.errors import ConfigError, Problem
from megalite.launcher.process import available_cores

_REMEDY = "name a text, as in megalite train --data.source book.txt, or write a RUN.toml with megalite init"
# For a text that is not there: the other problems of the command line are reported with it.
_UNKNOWN_LENGTH, _UNKNOWN_WORDS = 1_000_000, 10_000
_BYTES_PER_TOKEN, _CHARACTERS_PER_TOKEN = 2, 3


def starter_of(overrides: Sequence[str]) -> Starter:
    """Return the starter for the flags of a command line without RUN.toml.

    Raises ConfigError if they name no text, and DataError if the text cannot be read.
    """
    draft = SettingsDraft(COMMAND_LINE)
    apply_overrides(draft, overrides)
    data = draft.section("data")
    source = data.get("source")
    if not source:
        raise ConfigError([Problem("RUN.toml", "is required without --data.source", _REMEDY)], COMMAND_LINE)
    sources = list(map(str, source)) if isinstance(source, list) else [str(source)]
    text_column, pattern = (
        str(data.get(key, default)) for key, default in (("text_column", "text"), ("pattern", "*"))
    )
    kind = str(data.get("kind")) if data.get("kind") in CORPUS_OF else "text"
    return starter_for(sources, text_column=text_column, pattern=pattern, kind=kind)


def starter_for(
    sources: Sequence[str],
    *,
    text_column: str = "text",
    pattern: str = "*",
    size: str = "tiny",
    kind: str = "text",
) -> Starter:
    """Return the starter for a text and one of SIZES. kind: data.kind. Raises DataError if the text cannot be read."""
    cores = available_cores()
    if len(sources) == 1 and is_prepared(sources[0]):
        ids = Path(f"{prefix_of(sources[0])}.bin")
        tokens = ids.stat().st_size // _BYTES_PER_TOKEN if exists(ids) else 0
        return Starter(sources[0], tokens * _CHARACTERS_PER_TOKEN, None, 0, cores, SIZES[size])
    there = [each for each in sources if each == STANDARD_LIBRARY or exists(Path(each).expanduser())]
    if not there:
        return Starter(sources[0], _UNKNOWN_LENGTH, _UNKNOWN_WORDS, 0, cores, SIZES[size])
    measured = measure_text(there, text_column=text_column, pattern=pattern, kind=kind)
    return Starter(
        sources[0], measured.characters, measured.words, measured.documents, cores, SIZES[size], kind
    )
