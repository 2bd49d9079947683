"""The options of `megalite evaluate`, and the rules over them."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from megalite.cli.arguments import Parser, add_chat_template, add_model, add_value, flag, whole_number
from megalite.errors import Problem
from megalite.evaluate.task_list import is_local
from megalite.generation.layout_and_memory import layout_problems
from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape

# Option -> what it has an effect on: --data or --tasks.
SUBJECTS = {
    **dict.fromkeys(("window", "stride", "join", "text_column", "pattern"), "data"),
    **dict.fromkeys(
        ("num_fewshot", "limit", "gen_kwargs", "chat", "chat_template", "seed", "allow_code"), "tasks"
    ),
}


def problems(options: argparse.Namespace, layout: Layout, shape: ModelShape) -> Iterator[Problem]:
    """Yield all problems of the options."""
    yield from layout_problems(layout, shape)
    yield from _of_subject(options)
    if options.data:
        yield from _of_windows(options, shape)
    if options.output is not None:
        folder = options.output.expanduser().resolve().parent
        if options.output.is_dir():
            yield Problem("--output", f"{options.output} is a folder", "name a file, such as results.json")
        elif not folder.is_dir() or not os.access(folder, os.W_OK):
            yield Problem("--output", f"{folder} is no folder that can be written", "name another file")


def _of_subject(options: argparse.Namespace) -> Iterator[Problem]:
    if bool(options.data) == bool(options.tasks):
        yield Problem("--data", "texts or tasks are evaluated, one of them", "give --data or --tasks")
        return
    subject = "data" if options.data else "tasks"
    for option, needed in SUBJECTS.items():
        if getattr(options, option) not in (None, False) and subject != needed:
            yield Problem.reset(flag(option), f"has no effect with --{subject}", "leave it out")
    if options.chat_template and not options.chat:
        yield Problem(
            "--chat-template", "has no effect without --chat", "add --chat, or leave it out", {"--chat": True}
        )
    for name in options.tasks or ():
        if is_local(name) and not Path(name).expanduser().exists():
            yield Problem(
                "--tasks", f"{name} does not exist", "name a .yaml file, a folder, or a task of lm_eval"
            )


def _of_windows(options: argparse.Namespace, shape: ModelShape) -> Iterator[Problem]:
    longest = shape.longest_sequence
    window = options.window or longest
    if window > longest:
        yield Problem.reset(
            "--window",
            f"{window} tokens are more than the model's {longest}",
            f"use at most {longest}",
            longest,
        )
    if (options.stride or window) > window:
        message = f"{options.stride} tokens are more than the window of {window}, so some would not be scored"
        yield Problem.reset("--stride", message, f"use at most {window}", window)


_COMMON = (
    *("model", "--data", "--tasks", "--num-fewshot", "--limit", "--chat", "--output", "--dtype"),
    *("--batch-size", "--tensor", "--pipeline", "--context", "--data-parallel"),
)


def evaluate_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(prog="megalite evaluate", description=description, common=_COMMON)
    add_value(parser, "--output", Path, "FILE", "write the results as JSON too")
    add_value(parser, "--batch-size", whole_number(1), "N", "sequences or answers computed at a time", 8)
    add_model(parser)
    add_value(parser, "--data-parallel", whole_number(1), "N", "copies of the model that share the work", 1)
    _add_text(parser)
    _add_tasks(parser)
    return parser


def _add_text(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("perplexity")
    about = "text files, folders, .jsonl, .parquet, or the prefix of a prepared token file"
    group.add_argument("--data", nargs="+", metavar="SOURCE", help=about)
    add_value(group, "--window", whole_number(1), "N", "tokens read at once (the model's longest sequence)")
    add_value(group, "--stride", whole_number(1), "N", "tokens that each later window scores (the window)")
    about = "score the documents as one stream instead of each alone"
    group.add_argument("--join", action="store_true", help=about)
    add_value(group, "--text-column", str, "NAME", "column of the text in .jsonl and .parquet (text)")
    add_value(group, "--pattern", str, "GLOB", "which files of a folder to read (*)")


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tasks, by EleutherAI's lm_eval")
    about = "names of lm_eval tasks, .yaml files, or their folders"
    add_value(group, "--tasks", _names, "TASK[,TASK]", about)
    add_value(group, "--num-fewshot", whole_number(0), "N", "solved examples before each question")
    add_value(group, "--limit", whole_number(1), "N", "only the first N questions of each task")
    about = "settings of generation in place of the tasks' own, such as max_gen_toks=64"
    add_value(group, "--gen-kwargs", str, "KEY=VALUE[,...]", about)
    group.add_argument("--chat", action="store_true", help="ask in the chat template of the model")
    add_chat_template(parser)
    add_value(group, "--seed", whole_number(0), "N", "random seed of examples and samples")
    about = "permit generated programs to run on this machine"
    group.add_argument("--allow-code", action="store_true", help=about)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
