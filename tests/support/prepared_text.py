"""Prepare a text as one token file."""

from collections.abc import Callable
from pathlib import Path

from megalite.data.files.prepared import PreparedFacts
from megalite.data.prepare.prepare import Preparation, prepare_outputs
from megalite.data.text.corpus import Corpus
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.monitor.preparation import PreparationProgress


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    prefix: Path,
    *,
    workers: int = 0,
    progress: Callable[[PreparationProgress], None] | None = None,
) -> PreparedFacts:
    """Run `prepare_outputs` with a single output, `prefix`.bin and .idx."""
    [facts] = prepare_outputs(Preparation(corpus, tokenizer, (prefix,)), workers=workers, progress=progress)
    return facts
