"""The options of `megalite evaluate`, and the rules over them."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from megalite.cli.arguments import Parser, add_chat_template, whole_number
from megalite.errors import Problem
from megalite.evaluate.forms import FORMS, KINDS
from megalite.generation.layout import layout_problems
from megalite.generation.request import sampling_problems
from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape

# Option -> the subjects that it has an effect on: "data" or a kind of task.
SUBJECTS = {
    **dict.fromkeys(("window", "stride", "join", "text_column", "pattern"), ("data",)),
    **dict.fromkeys(("kind", "form", "field", "limit"), KINDS),
    **dict.fromkeys(
        ("few_shot", "few_shot_file", "chat", "chat_template", "few_shot_turns"),
        ("multiple_choice", "exact_match"),
    ),
    "tokens": ("exact_match", "code"),
    "seed": KINDS,
    **dict.fromkeys(
        ("allow_code", "samples", "samples_file", "k", "temperature", "top_p", "timeout", "memory"), ("code",)
    ),
}
TOKENS, SAMPLES, SECONDS, MEBIBYTES = 256, 1, 10, 1024


def problems(options: argparse.Namespace, layout: Layout, shape: ModelShape | None) -> Iterator[Problem]:
    """Yield all problems of the options; shape: None if no model is named."""
    if shape is not None:
        yield from layout_problems(layout, shape)
    yield from _of_subject(options)
    if options.data and shape is not None:
        yield from _of_windows(options, shape)
    if options.kind == "code":
        yield from _of_code(options)
    if options.kind == "exact_match":
        yield from sampling_problems(options.tokens or TOKENS, {}, flag)
    if options.output is not None:
        folder = options.output.expanduser().resolve().parent
        if options.output.is_dir():
            yield Problem("--output", f"{options.output} is a folder", "name a file, such as results.json")
        elif not folder.is_dir() or not os.access(folder, os.W_OK):
            yield Problem("--output", f"{folder} is no folder that can be written", "name another file")


def flag(setting: str) -> str:
    """Return how an option is typed."""
    return f"--{setting.replace('_', '-')}"


def _of_subject(options: argparse.Namespace) -> Iterator[Problem]:
    if bool(options.data) == bool(options.task):
        yield Problem("--data", "a text or a task is evaluated, one of them", "give --data or --task")
        return
    subject = "data" if options.data else options.kind
    if subject is None:
        yield Problem("--kind", "is missing", f"use one of {', '.join(KINDS)}")
        return
    for option, subjects in SUBJECTS.items():
        if getattr(options, option) not in (None, False) and subject not in subjects:
            of = "--data" if subject == "data" else f"--kind {subject}"
            yield Problem(flag(option), f"has no effect with {of}", "leave it out")
    if options.form is not None and FORMS[options.form].kind != subject and subject != "data":
        fitting = [name for name, form in FORMS.items() if form.kind == subject]
        yield Problem("--form", f"{options.form} is no form of {subject}", f"use one of {', '.join(fitting)}")
    if bool(options.few_shot) != bool(options.few_shot_file):
        given = "--few-shot" if options.few_shot else "--few-shot-file"
        yield Problem(given, "needs --few-shot N and --few-shot-file FILE", "give both, or none")
    for option, needed in (
        ("chat_template", "chat"),
        ("few_shot_turns", "chat"),
        ("few_shot_turns", "few_shot"),
    ):
        if getattr(options, option) and not getattr(options, needed):
            yield Problem(
                flag(option), f"has no effect without {flag(needed)}", f"add {flag(needed)}, or leave it out"
            )
    if options.model is None and options.samples_file is None:
        yield Problem("MODEL", "is missing", "name a run folder, a checkpoint or a Hugging Face folder")


def _of_windows(options: argparse.Namespace, shape: ModelShape) -> Iterator[Problem]:
    longest = shape.longest_sequence
    window = options.window or longest
    if window > longest:
        yield Problem(
            "--window", f"{window} tokens are more than the model's {longest}", f"use at most {longest}"
        )
    if (options.stride or window) > window:
        message = f"{options.stride} tokens are more than the window of {window}, so some would not be scored"
        yield Problem("--stride", message, f"use at most {window}")


def _of_code(options: argparse.Namespace) -> Iterator[Problem]:
    if not options.allow_code:
        yield Problem(
            "--kind code",
            "pass@k runs the generated programs on this machine",
            "add --allow-code to permit that (best in a container)",
        )
    samples = options.samples or SAMPLES
    values = {"temperature": options.temperature, "top_p": options.top_p}
    yield from sampling_problems(options.tokens or TOKENS, values, flag)
    if options.samples_file is not None:
        for option in ("samples", "temperature", "top_p", "tokens", "seed"):
            if getattr(options, option) is not None:
                yield Problem(flag(option), "has no effect with --samples-file", "leave it out")
        return
    if samples > 1 and not options.temperature:
        message = f"{samples} greedy samples of a problem are all alike"
        yield Problem("--samples", message, "set --temperature above 0, for example 0.8")
    if max(options.k or [1]) > samples:
        yield Problem(
            "--k",
            f"pass@{max(options.k)} needs more than {samples} samples",
            f"use --samples {max(options.k)}",
        )


def column(text: str) -> tuple[str, str]:
    """Parse FIELD=COLUMN."""
    field, _, name = text.partition("=")
    known = sorted({each for form in FORMS.values() for each in form.fields})
    if not name or field not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=COLUMN with a field of {', '.join(known)}")
    return field, name


_COMMON = (
    *("model", "--data", "--task", "--kind", "--few-shot", "--limit", "--output", "--dtype", "--batch-size"),
    *("--tensor", "--pipeline", "--data-parallel"),
)


def evaluate_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(prog="megalite evaluate", description=description, common=_COMMON)
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="run folder (its latest checkpoint), checkpoint, Hugging Face or PEFT folder, or org/name on the Hub",
    )
    add("--output", type=Path, metavar="FILE", help="write the results as JSON too")
    kinds = ("float32", "bfloat16")
    add("--dtype", choices=kinds, default="float32", help="type of weights and computation (float32)")
    add(
        "--batch-size",
        type=whole_number(1),
        default=8,
        metavar="N",
        help="sequences or answers computed at a time (8)",
    )
    add("--tensor", type=whole_number(1), default=1, metavar="N", help="tensor-parallel size (1)")
    add("--pipeline", type=whole_number(1), default=1, metavar="N", help="pipeline-parallel size (1)")
    add(
        "--data-parallel",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="copies of the model that share the work (1)",
    )
    add("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer folder (default: the model's own)")
    add("--base", type=Path, metavar="FOLDER", help="the weights beside an adapter, where they have moved")
    _add_text(parser)
    _add_task(parser)
    _add_code(parser)
    return parser


def _add_text(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("perplexity").add_argument
    add(
        "--data",
        nargs="+",
        metavar="SOURCE",
        help="text files, folders, .jsonl, .parquet, or the prefix of a prepared token file",
    )
    add(
        "--window",
        type=whole_number(1),
        metavar="N",
        help="tokens read at once (the model's longest sequence)",
    )
    add(
        "--stride",
        type=whole_number(1),
        metavar="N",
        help="tokens that each later window scores (the window)",
    )
    add("--join", action="store_true", help="score the documents as one stream instead of each alone")
    add("--text-column", metavar="NAME", help="column of the text in .jsonl and .parquet (text)")
    add("--pattern", metavar="GLOB", help="which files of a folder to read (*)")


def _add_task(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tasks").add_argument
    add("--task", type=Path, metavar="FILE", help="questions: .jsonl, .json or .parquet")
    add("--kind", choices=KINDS, help="how answers are scored")
    add("--form", choices=tuple(FORMS), help="form of the rows (default: recognised by the columns)")
    add("--field", action="append", type=column, metavar="FIELD=COLUMN", help="column of a field of the form")
    add("--limit", type=whole_number(1), metavar="N", help="only the first N questions")
    add("--few-shot", type=whole_number(1), metavar="N", help="solved examples before each question")
    add("--few-shot-file", type=Path, metavar="FILE", help="where the examples are drawn from")
    add("--chat", action="store_true", help="ask in the chat template, as lm_eval's --apply_chat_template")
    add_chat_template(parser)
    add("--few-shot-turns", action="store_true", help="with --chat: each example is a message and its answer")
    add("--seed", type=int, metavar="N", help="random seed of examples and samples (0)")
    add("--tokens", type=whole_number(1), metavar="N", help=f"most new tokens of an answer ({TOKENS})")


def _add_code(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("code").add_argument
    add("--allow-code", action="store_true", help="permit generated programs to run on this machine")
    add("--samples", type=whole_number(1), metavar="N", help=f"programs of each problem ({SAMPLES})")
    add(
        "--samples-file",
        type=Path,
        metavar="FILE",
        help="rows of task_id and completion instead of the model's",
    )
    add("--k", type=whole_number(1), nargs="+", metavar="K", help="the k of pass@k (1)")
    add("--temperature", type=float, metavar="T", help="sampling temperature; 0: greedy (0)")
    add("--top-p", type=float, metavar="P", help="sample from the fewest tokens with total probability P")
    add("--timeout", type=whole_number(1), metavar="SECONDS", help=f"most time of a program ({SECONDS})")
    add("--memory", type=whole_number(32), metavar="MIB", help=f"most memory of a program ({MEBIBYTES})")
