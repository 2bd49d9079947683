"""X.json beside a prepared X.bin and X.idx: where they come from and what they hold."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, get_origin

from megalite.data.files.partial_files import json_path, replace_json
from megalite.data.files.token_file import bin_path, idx_path
from megalite.data.text.row_counts import RowCounts


@dataclass(frozen=True)
class PreparedFacts:
    """The content of X.json: the origin of X.bin and X.idx, their sizes, and what they hold."""

    fingerprint: str
    sources: tuple[str, ...]
    files: int
    documents: int
    tokens: int
    dtype: str
    bin_bytes: int
    idx_bytes: int
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    end_of_document: str
    end_of_document_id: int
    min_length: int = 0
    short_documents: int = 0
    """Documents that were skipped, with fewer than min_length tokens."""
    source_bytes: int = -1
    """The size of the source files on disk; -1: not recorded, as by earlier versions."""
    content_fingerprint: str = ""
    largest_id: int = -1
    tokenizer_beside: str = ""
    """The tokenizer.json relative to the folder of the token file, for a folder that was moved with both."""
    split_by_tokens: bool = False
    """Whether the text had too few documents for its split, so that it was cut between two tokens."""
    kind: str = "text"
    """The data.kind: the tokens of "instruct" and "preference" are marked (trained_tokens)."""
    sequence_length: int = 0
    """instruct: the conversations fit this many positions."""
    truncated_documents: int = 0
    dropped_documents: int = 0
    """instruct: conversations that were longer."""
    train_on: str = ""
    chat_template: str = ""
    """instruct: where the template comes from, for messages."""
    chat_template_sha256: str = ""
    """instruct: this and the two before are empty in files of earlier versions."""
    counts: dict[str, Any] = field(default_factory=dict)
    """RowCounts of the sources, all parts of a split together."""

    @property
    def unit(self) -> str:
        """The word for a document; "sample" where the chat template makes several of a conversation."""
        if RowCounts.of_json(self.counts).more_samples:
            return "sample"
        return {"instruct": "conversation", "preference": "answer"}.get(self.kind, "document")


def prepared_facts(prefix: Path) -> PreparedFacts | None:
    """Return the facts of the token file at `prefix`; None unless all three files exist with matching sizes."""
    try:
        fields = json.loads(json_path(prefix).read_text(encoding="utf-8"))
        facts = PreparedFacts(**{**fields, "sources": tuple(map(str, fields["sources"]))})
        sizes = (bin_path(prefix).stat().st_size, idx_path(prefix).stat().st_size)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # another program's .json, or an incomplete set of files
    kinds: dict[str, Any] = {each.name: get_origin(each.type) or each.type for each in fields_of(facts)}
    typed = all(isinstance(getattr(facts, name), kind) for name, kind in kinds.items())
    return facts if typed and sizes == (facts.bin_bytes, facts.idx_bytes) else None


def source_notes(facts: PreparedFacts | None) -> Iterator[str]:
    """Yield lines about the rows of the sources: keys without effect, and conversations of several samples."""
    if facts is not None:
        yield from RowCounts.of_json(facts.counts).sentences(facts.sources)


def update_facts(prefix: Path, facts: PreparedFacts) -> None:
    """Replace X.json if its folder can be written; elsewhere the next start compares the text again."""
    with suppress(OSError):
        replace_json(json_path(prefix), asdict(facts))


def recorded_tokenizer(prefix: Path, facts: PreparedFacts) -> Path | None:
    """Return the tokenizer.json that X.json names: where it was, or beside X in a folder that moved; None if gone."""
    places = [Path(facts.tokenizer)]
    if facts.tokenizer_beside:
        places.append((prefix.parent / facts.tokenizer_beside).resolve())
    there = [place for place in places if place.is_file()]
    same = (
        place for place in there if hashlib.sha256(place.read_bytes()).hexdigest() == facts.tokenizer_sha256
    )
    return next(same, there[0] if there else None)
