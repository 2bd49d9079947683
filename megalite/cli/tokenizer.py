"""megalite tokenizer: train or convert a tokenizer and write it as a Hugging Face folder."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megalite.cli.arguments import Parser, add_setting
from megalite.cli.results import report
from megalite.errors import counted


def run(arguments: Sequence[str]) -> int:
    """Run `megalite tokenizer train` or `convert` and return the exit code. Raises DataError."""
    options = command_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _train(options: argparse.Namespace) -> int:
    # Imported here, so that --help does not wait for these libraries.
    from megalite.data.text.corpus import Corpus
    from megalite.data.tokenizers.tokenizer import END_OF_DOCUMENT, load_tokenizer
    from megalite.data.tokenizers.tokenizer_training import fitting_vocab_size, train_into
    from megalite.monitor.preparation import PreparationConsole, megabytes

    _refuse_standing(options)
    corpus = Corpus.open(options.source, text_column=options.text_column, pattern=options.pattern)
    corpus.require_text()
    fits = options.vocab_size == "auto"
    size = fitting_vocab_size(corpus.text_bytes) if fits else options.vocab_size
    console = PreparationConsole(sys.stderr)
    files = counted(len(corpus.files), "file")
    console.begin(f"training on {megabytes(corpus.size_bytes)} of text ({files})")
    train_into(
        options.output,
        (piece for piece, _ in corpus.pieces()),
        size,
        at_most=fits,
        kind=options.kind,
        end_of_document=options.end_of_document or END_OF_DOCUMENT,
    )
    for name in _left_over(options.kind):
        (options.output / name).unlink(missing_ok=True)
    seconds = console.end("trained")
    reached = load_tokenizer(options.output, end_of_document=options.end_of_document).vocab_size
    report(tokenizer=options.output, vocab_size=reached, seconds=seconds)
    print(f"{options.output}: {reached} ids from {files} in {seconds:.1f} s")
    return 0


def _left_over(kind: str) -> set[str]:
    """Return file names that only an earlier tokenizer can have left: AutoTokenizer would read some of them."""
    from megalite.data.tokenizers.tokenizer import SENTENCEPIECE_FILE, TOKENIZER_FILES

    written = {"tokenizer.json", "tokenizer_config.json"} | ({SENTENCEPIECE_FILE} if kind != "bpe" else set())
    return set(TOKENIZER_FILES) - written


def _convert(options: argparse.Namespace) -> int:
    from megalite.data.tokenizers.tokenizer import load_tokenizer
    from megalite.data.tokenizers.tokenizer_import import import_tokenizer

    _refuse_standing(options)
    import_tokenizer(options.path, options.output, options.end_of_document)
    tokenizer = load_tokenizer(options.output, end_of_document=options.end_of_document)
    ends = f"documents end in {tokenizer.end_of_document!r}"
    report(
        tokenizer=options.output, vocab_size=tokenizer.vocab_size, end_of_document=tokenizer.end_of_document
    )
    print(f"{options.output}: {tokenizer.vocab_size} ids of {options.path}; {ends}")
    return 0


def _refuse_standing(options: argparse.Namespace) -> None:
    """Raise DataError if the output folder has a tokenizer: its token files and models would no longer fit."""
    from megalite.data.tokenizers.tokenizer import TOKENIZER_FILES
    from megalite.errors import DataError

    standing = next((name for name in TOKENIZER_FILES if (options.output / name).exists()), None)
    if standing is not None and not options.overwrite:
        raise DataError(
            f"{options.output / standing} exists and would be replaced; choose another --output, or add --overwrite",
            key="--output",
            set={"--overwrite": True},
            value=options.output,
        )


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a text; the same settings as in the section [data] of a run file."""
    parser.add_argument(
        "--source",
        action="append",
        required=True,
        help="text file, folder, .jsonl, .parquet, .gz, or stdlib (the Python library's sources); may be repeated",
    )
    add_setting(parser, "data.text_column")
    add_setting(parser, "data.pattern")
    _add_end_of_document(parser)


def _vocab_size(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of ids nor auto") from None


def _token(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the token is empty; name one, for example <|endoftext|>")
    return text


def _add_end_of_document(parser: argparse.ArgumentParser) -> None:
    add_setting(parser, "tokenizer.end_of_document", type=_token, metavar="TOKEN")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer in that folder")


def command_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megalite tokenizer", description=__doc__)
    commands = parser.add_subparsers()
    train = commands.add_parser("train", help="train a tokenizer on a text")
    add_source_options(train)
    about = "exact number of ids (default: auto, as many as fit the text)"
    train.add_argument("--vocab-size", type=_vocab_size, default="auto", metavar="N", help=about)
    add_setting(train, "tokenizer.kind")
    _add_output(train)
    train.set_defaults(command=_train)
    convert = commands.add_parser(
        "convert", help="write a sentencepiece model or GPT-2's files as a tokenizer.json"
    )
    convert.add_argument("path", type=Path, metavar="PATH", help="sentencepiece .model, or tokenizer folder")
    _add_end_of_document(convert)
    _add_output(convert)
    convert.set_defaults(command=_convert)
    return parser
