"""megalite data: tokenize text into a Megatron token file (X.bin, X.idx), or inspect one."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.cli.arguments import Parser, add_setting, add_value, whole_number
from megalite.cli.results import report
from megalite.cli.tokenizer import add_source_options
from megalite.config.sections.describe import setting, type_names
from megalite.errors import counted

if TYPE_CHECKING:
    from megalite.data.chat.conversation_encoding import ChatEncoding
    from megalite.data.files.prepared import PreparedFacts
    from megalite.data.prepare.split import Split
    from megalite.data.tokenizers.tokenizer import Tokenizer

_OF_CONVERSATIONS = ("chat_template", "train_on", "sequence_length", "too_long")


def run(arguments: Sequence[str]) -> int:
    """Run `megalite data prepare` or `inspect` and return the exit code. Raises DataError."""
    parser = command_parser()
    options = parser.parse_args(arguments)
    if options.command is _prepare:
        _check_kind(parser, options)
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _check_kind(parser: Parser, options: argparse.Namespace) -> None:
    """End with one line if options of conversations and of text are mixed."""
    kind = options.kind
    if kind != "text" and options.sequence_length is None:
        parser.error(f"--kind {kind} needs --sequence-length, the training.sequence_length of the runs")
    if kind != "text" and options.text_column != setting("data.text_column").default:
        parser.error(f"argument --text-column: has no effect with --kind {kind}")
    for name in _OF_CONVERSATIONS if kind == "text" else ():
        if getattr(options, name) is not None:
            parser.error(f"argument --{name.replace('_', '-')}: has no effect without --kind instruct")
    if kind == "preference" and options.train_on is not None:
        parser.error("argument --train-on: has no effect with --kind preference")
    if kind == "preference" and options.min_length:
        parser.error("argument --min-length: would leave out one answer of a pair")
    if kind == "preference" and options.too_long == "keep":
        parser.error('argument --too-long: keep is for data.packing = "concatenate", not for pairs')


def _prepare(options: argparse.Namespace) -> int:
    # Imported here, so that --help does not wait for these libraries.
    from megalite.data.chat.conversation_corpus import CORPUS_OF
    from megalite.data.chat.turn_end import turn_end_notes
    from megalite.data.files.prepared import source_notes
    from megalite.data.prepare.prepare import Preparation, prepare_outputs
    from megalite.data.prepare.split import Split
    from megalite.data.tokenizers.tokenizer import load_tokenizer
    from megalite.launcher.process import available_cores
    from megalite.monitor.preparation import PreparationConsole, megabytes

    split = Split(tuple(options.split), options.seed)
    opened = CORPUS_OF[options.kind].open(
        options.source, text_column=options.text_column, pattern=options.pattern
    )
    tokenizer = load_tokenizer(_tokenizer_folder(options), end_of_document=options.end_of_document)
    preparation = Preparation(
        opened,
        tokenizer,
        outputs=tuple(_outputs(options.output, split)),
        min_length=options.min_length,
        split=split,
        sequence_length=options.sequence_length or 1,
        chat=_chat(options, tokenizer),
    )
    _refuse_foreign(preparation.outputs)
    standing = preparation.done()
    _report(preparation.outputs, standing or (), up_to_date=standing is not None)
    for prefix, facts in zip(preparation.outputs, standing or (), strict=False):
        print(f"{prefix}: up to date, {_counts(facts)}")
    if standing is not None:
        for note in source_notes(standing[0]):
            print(note)
        return 0
    workers = available_cores() if options.workers is None else options.workers
    console = PreparationConsole(sys.stderr)
    corpus = preparation.corpus
    if preparation.chat is not None:
        template = preparation.chat.template
        for note in turn_end_notes(
            template, tokenizer, may_add_tokens=True, flags=True, workers=min(1, workers)
        ):
            console.note(note)
    console.begin(f"tokenizing {megabytes(corpus.size_bytes)} of text ({counted(len(corpus.files), 'file')})")
    prepared = prepare_outputs(preparation, workers=workers, progress=console.progress)
    seconds = console.end(counted(sum(facts.documents for facts in prepared), prepared[0].unit))
    for prefix, facts in zip(preparation.outputs, prepared, strict=True):
        print(f"{prefix}: {_counts(facts)}")
    _report(preparation.outputs, prepared, seconds=seconds)
    tokens = sum(facts.tokens for facts in prepared)
    print(f"{tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} tokens/s)")
    if prepared[0].split_by_tokens:
        print(f"{', '.join(corpus.sources)} has too few documents for --split and is split by tokens")
    for note in source_notes(prepared[0]):
        print(note)
    return 0


def _report(prefixes: Sequence[Path], prepared: "Sequence[PreparedFacts]", **more: Any) -> None:
    outputs = [{"prefix": prefix, **vars(facts)} for prefix, facts in zip(prefixes, prepared, strict=False)]
    report(outputs=outputs, **more)


def _chat(options: argparse.Namespace, tokenizer: "Tokenizer") -> "ChatEncoding | None":
    """Return how conversations are encoded; None for text."""
    if options.kind == "text":
        return None
    from megalite.data.chat.chat_settings import chat_encoding

    train_on = options.train_on or setting("data.train_on").default
    too_long = options.too_long or setting("data.too_long").default
    return chat_encoding(
        tokenizer,
        options.chat_template,
        train_on,
        options.sequence_length,
        too_long,
        kind=options.kind,
    )


def _tokenizer_folder(options: argparse.Namespace) -> Path:
    """Return the tokenizer's folder; one of another format, or with added tokens, is made next to the output."""
    from megalite.data.tokenizers.tokenizer_import import foreign_tokenizer

    if options.add_tokens:
        return _with_added_tokens(options)
    foreign = foreign_tokenizer(options.tokenizer)
    if foreign is None:
        own: Path = options.tokenizer
        return own
    folder: Path = options.output.with_name(f"{options.output.name}-tokenizer")
    foreign.write_into(folder, options.end_of_document or foreign.end_of_document)
    return folder


def _with_added_tokens(options: argparse.Namespace) -> Path:
    """Return the folder of the tokenizer with --add-tokens, the same one that a run makes of tokenizer.add_tokens."""
    from megalite.config.sections.text_sections import TokenizerConfig
    from megalite.data.tokenizers.run_tokenizer import TokenizerRequest, run_tokenizer
    from megalite.monitor.preparation import PreparationConsole

    settings = TokenizerConfig(
        path=str(options.tokenizer),
        end_of_document=options.end_of_document,
        add_tokens=tuple(options.add_tokens),
    )
    folder: Path = options.output.with_name(f"{options.output.name}-tokenizer")
    request = TokenizerRequest(settings, folder, (), (), rows=None, refuse_change=lambda _: None)
    made = run_tokenizer(request, PreparationConsole(sys.stderr))
    assert made is not None, "a path was given"
    return made


def _outputs(prefix: Path, split: "Split") -> list[Path]:
    from megalite.data.prepare.split import PARTS

    if len(split.shares) == 1:
        return [prefix]
    return [prefix.with_name(f"{prefix.name}-{PARTS[part]}") for part in split.parts]


def _refuse_foreign(prefixes: Sequence[Path]) -> None:
    """Raise DataError if an output exists that another program wrote: files of ours have a .json, maybe partial."""
    from megalite.data.files.partial_files import json_path, partial
    from megalite.data.files.token_file import bin_path, idx_path
    from megalite.errors import DataError

    for prefix in prefixes:
        ours = json_path(prefix).exists() or partial(json_path(prefix)).exists()
        if not ours and bin_path(prefix).exists() and idx_path(prefix).exists():
            raise DataError(
                f"{bin_path(prefix)} was not written by megalite data prepare and would be replaced; "
                "choose another --output, or remove it"
            )


def _inspect(options: argparse.Namespace) -> int:
    from megalite.cli.data_inspect import inspect

    return inspect(options.prefix, options.documents, duplicates=options.duplicates)


def _counts(facts: "PreparedFacts") -> str:
    left_out = [f"{facts.short_documents:,} shorter ones skipped"] if facts.short_documents else []
    left_out += [f"{facts.truncated_documents:,} longer ones cut"] if facts.truncated_documents else []
    left_out += [f"{facts.dropped_documents:,} longer ones left out"] if facts.dropped_documents else []
    others = f" ({', '.join(left_out)})" if left_out else ""
    return f"{facts.documents:,} {facts.unit}s{others}, {facts.tokens:,} tokens of {facts.dtype}"


class _Shares(argparse.Action):
    """Check the shares of --split together; an argparse type sees only one value at a time."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        from megalite.config.rules.data import wrong_shares

        wrong = wrong_shares(values)
        if wrong is not None:
            parser.error(f"argument {flag}: {wrong[0]}; {wrong[1]}")
        setattr(options, self.dest, values)


def command_parser() -> Parser:
    parser = Parser(prog="megalite data", description=__doc__)
    commands = parser.add_subparsers()
    prepare = commands.add_parser("prepare", help="tokenize text or conversations into X.bin and X.idx")
    add_source_options(prepare)
    about = "Hugging Face folder, or a sentencepiece .model"
    prepare.add_argument("--tokenizer", type=Path, required=True, metavar="PATH", help=about)
    about = "prefix of the files to write"
    prepare.add_argument("--output", type=Path, required=True, metavar="X", help=about)
    about = "number of tokenizing processes (default: one per core; 0: tokenize in this process)"
    add_value(prepare, "--workers", whole_number(0), "N", about)
    add_setting(prepare, "data.min_length", type=whole_number(0), metavar="N")
    prepare.add_argument(
        "--split",
        type=float,
        nargs="+",
        default=[1.0],
        action=_Shares,
        metavar="SHARE",
        help="fractions of the documents for X-train, X-validation and X-test, for example 0.98 0.01 0.01",
    )
    add_setting(prepare, "run.seed", type=int, help="random seed of the split")
    add_setting(prepare, "tokenizer.add_tokens", nargs="+", default=[], metavar="TOKEN")
    # The settings of conversations have no effect on text.
    add_setting(prepare, "data.kind")
    add_setting(prepare, "tokenizer.chat_template", metavar="NAME")
    add_setting(prepare, "data.train_on", default=None)
    about = "instruct: training.sequence_length of the runs that will train on the files"
    add_value(prepare, "--sequence-length", whole_number(1), "N", about)
    too_long = setting("data.too_long")
    about = f'{too_long.description}; keep: for data.packing = "concatenate"'
    choices = [*type_names(too_long.annotation), "keep"]
    add_setting(prepare, "data.too_long", default=None, choices=choices, help=about)
    prepare.set_defaults(command=_prepare)
    inspect = commands.add_parser("inspect", help="print counts, lengths and the first documents")
    inspect.add_argument("prefix", type=Path, metavar="X", help="prefix of the files, without .bin or .idx")
    add_value(inspect, "--documents", whole_number(0), "N", "number of documents to print", 3)
    about = "also count repeated documents; reads the whole file"
    inspect.add_argument("--duplicates", action="store_true", help=about)
    inspect.set_defaults(command=_inspect)
    return parser
