"""The options of `megalite evaluate`, and the rules over them."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from megalite.cli.arguments import Parser, add_chat_template, whole_number
from megalite.errors import Problem
from megalite.evaluate.task_list import is_local
from megalite.generation.layout_and_memory import layout_problems
from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape

# Option -> what it has an effect on: --data or --tasks.
SUBJECTS = {
    **dict.fromkeys(("window", "stride", "join", "text_column", "pattern"), "data"),
    **dict.fromkeys(
        ("num_fewshot", "limit", "gen_kwargs", "chat", "chat_template", "seed", "allow_code"),
        "tasks",
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


def flag(setting: str) -> str:
    """Return how an option is typed."""
    return f"--{setting.replace('_', '-')}"


def _of_subject(options: argparse.Namespace) -> Iterator[Problem]:
    if bool(options.data) == bool(options.tasks):
        yield Problem("--data", "texts or tasks are evaluated, one of them", "give --data or --tasks")
        return
    subject = "data" if options.data else "tasks"
    for option, needed in SUBJECTS.items():
        if getattr(options, option) not in (None, False) and subject != needed:
            yield Problem(flag(option), f"has no effect with --{subject}", "leave it out")
    if options.chat_template and not options.chat:
        yield Problem("--chat-template", "has no effect without --chat", "add --chat, or leave it out")
    for name in options.tasks or ():
        if is_local(name) and not Path(name).expanduser().exists():
            yield Problem(
                "--tasks", f"{name} does not exist", "name a .yaml file, a folder, or a task of lm_eval"
            )


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


_COMMON = (
    *(
        "model",
        "--data",
        "--tasks",
        "--num-fewshot",
        "--limit",
        "--chat",
        "--output",
        "--dtype",
        "--batch-size",
    ),
    *("--tensor", "--pipeline", "--data-parallel"),
)


def evaluate_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(prog="megalite evaluate", description=description, common=_COMMON)
    add = parser.add_argument
    add(
        "model",
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
    _add_tasks(parser)
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


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tasks, by EleutherAI's lm_eval").add_argument
    add(
        "--tasks",
        type=_names,
        metavar="TASK[,TASK]",
        help="tasks of lm_eval by name, .yaml files of yours, or folders of them",
    )
    add("--num-fewshot", type=whole_number(0), metavar="N", help="solved examples before each question")
    add("--limit", type=whole_number(1), metavar="N", help="only the first N questions of each task")
    add(
        "--gen-kwargs",
        metavar="KEY=VALUE[,...]",
        help="settings of generation in place of the tasks' own, such as max_gen_toks=64",
    )
    add("--chat", action="store_true", help="ask in the chat template of the model")
    add_chat_template(parser)
    add("--seed", type=whole_number(0), metavar="N", help="random seed of examples and samples")
    add("--allow-code", action="store_true", help="permit generated programs to run on this machine")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
