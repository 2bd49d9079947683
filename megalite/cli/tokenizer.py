"""megalite tokenizer: train a byte-level BPE and write it as a Hugging Face folder."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def run(arguments: Sequence[str]) -> int:
    """`megalite tokenizer train`; returns the exit code, raises DataError."""
    options = _parser().parse_args(arguments)
    # Imported late, so that --help is instant.
    from rich.console import Console

    from megalite.data.corpus import Corpus
    from megalite.data.tokenizer import save_tokenizer, train_tokenizer

    started = time.perf_counter()
    corpus = Corpus.open(options.source, text_column=options.text_column, pattern=options.pattern)
    with Console(file=sys.stderr).status(f"training on {len(corpus.files)} files"):
        pieces = (piece for piece, _ in corpus.pieces())
        backend = train_tokenizer(pieces, options.vocab_size, end_of_document=options.end_of_document)
    save_tokenizer(backend, options.output, options.end_of_document)
    seconds = time.perf_counter() - started
    print(f"{options.output}: {options.vocab_size} ids from {len(corpus.files)} files in {seconds:.1f} s")
    return 0


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """The options that name a text, as in the section [data] of a run file."""
    parser.add_argument(
        "--source",
        action="append",
        required=True,
        help="text file, folder, .jsonl, .gz of these, or stdlib (the Python library's sources); may be repeated",
    )
    parser.add_argument("--text-column", default="text", help="which field of a .jsonl line is the text")
    parser.add_argument("--pattern", default="*", help="which files of a folder to read, for example '*.txt'")
    parser.add_argument(
        "--end-of-document",
        default="<|endoftext|>",
        metavar="TOKEN",
        help="the token that closes each document",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megalite tokenizer", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a byte-level BPE tokenizer")
    add_source_options(train)
    train.add_argument("--vocab-size", type=int, required=True, help="number of ids, exactly")
    train.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where to write it")
    return parser
