"""megalite evaluate: measure a model's perplexity on text, or its accuracy on a local task file."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.cli.arguments import Parser, whole_number
from megalite.cli.local_ranks import on_local_ranks
from megalite.errors import ConfigError, Problem
from megalite.evaluate.documents import TextSource
from megalite.evaluate.report import table, write_json
from megalite.generation.layout import layout_problems
from megalite.generation.source import ModelSource, find_source
from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape
from megalite.version import __version__

if TYPE_CHECKING:
    from megalite.evaluate.perplexity import TextEvaluation
    from megalite.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class _Request:
    """The arguments that every rank gets."""

    source: ModelSource
    layout: Layout
    options: argparse.Namespace


def run(arguments: Sequence[str]) -> int:
    """Print the figures; return the exit code. Raises CheckpointError, DataError, ConfigError."""
    options = _parser().parse_args(arguments)
    source = find_source(options.model, tokenizer=options.tokenizer, base=options.base)
    layout = Layout(pipeline=options.pipeline, data=options.data_parallel, tensor=options.tensor)
    if problems := list(_problems(options, layout, source.shape)):
        raise ConfigError(problems, "the request")
    # torch is imported below this line, so that --help and a wrong request are answered at once.
    preload = ["megalite.generation.text", "megalite.evaluate.perplexity"]
    return on_local_ranks(
        layout, _evaluate, _Request(source, layout, options), name="evaluate", preload=preload
    )


def _evaluate(request: _Request, mesh: "ParallelMesh") -> None:
    """Load the model, measure it, and show the figures on rank 0."""
    import torch

    from megalite.evaluate.perplexity import evaluate_text
    from megalite.generation.text import load_source

    options = request.options
    loaded = load_source(request.source, mesh, torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    started = time.perf_counter()
    figures = evaluate_text(loaded, _text_evaluation(options, loaded.config)).as_dict()
    seconds = time.perf_counter() - started
    if mesh.rank != 0:
        return
    print(f"{request.source.folder} on {', '.join(options.data)}\n{table(figures)}", flush=True)
    print(f"{figures['tokens']:,} tokens in {seconds:.1f} s", file=sys.stderr, flush=True)
    if options.output is not None:
        write_json(options.output, _record(request, figures, seconds))


def _text_evaluation(options: argparse.Namespace, shape: ModelShape) -> "TextEvaluation":
    from megalite.evaluate.perplexity import TextEvaluation

    window = options.window or shape.longest_sequence
    source = TextSource(tuple(options.data), options.text_column, options.pattern)
    return TextEvaluation(source, window, options.stride or window, options.join, options.batch_size)


def _record(request: _Request, figures: dict[str, Any], seconds: float) -> dict[str, Any]:
    options = request.options
    window = options.window or request.source.shape.longest_sequence
    settings = {
        "data": options.data,
        "window": window,
        "stride": options.stride or window,
        "join": options.join,
        "dtype": options.dtype,
        "batch_size": options.batch_size,
        "tensor": options.tensor,
        "pipeline": options.pipeline,
        "data_parallel": options.data_parallel,
    }
    about = {"megalite": __version__, "model": str(request.source.folder), "settings": settings}
    return {**about, "figures": figures, "seconds": round(seconds, 3)}


def _problems(options: argparse.Namespace, layout: Layout, shape: ModelShape) -> Iterator[Problem]:
    yield from layout_problems(layout, shape)
    longest = shape.longest_sequence
    window = options.window or longest
    if window > longest:
        yield Problem(
            "--window", f"{window} tokens are more than the model's {longest}", f"use at most {longest}"
        )
    if (options.stride or window) > window:
        yield Problem(
            "--stride",
            f"{options.stride} tokens are more than the window of {window}, so some would not be scored",
            f"use at most {window}",
        )
    if options.output is not None:
        folder = options.output.expanduser().resolve().parent
        if options.output.is_dir():
            yield Problem("--output", f"{options.output} is a folder", "name a file, such as results.json")
        elif not folder.is_dir() or not os.access(folder, os.W_OK):
            yield Problem("--output", f"{folder} is no folder that can be written", "name another file")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megalite evaluate", description=__doc__)
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="run folder (its latest checkpoint), checkpoint, Hugging Face folder, PEFT adapter, or org/name on the Hub",
    )
    add("--output", type=Path, metavar="FILE", help="write the results as JSON too")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="type of weights and computation (fp32)")
    add("--batch-size", type=whole_number(1), default=8, metavar="N", help="sequences of one forward pass (8)")
    add("--tensor", type=whole_number(1), default=1, metavar="N", help="tensor-parallel size (1)")
    add("--pipeline", type=whole_number(1), default=1, metavar="N", help="pipeline-parallel size (1)")
    add("--data-parallel", type=whole_number(1), default=1, metavar="N", help="copies of the model that share the work (1)")
    add("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer folder (default: the model's own)")
    add("--base", type=Path, metavar="FOLDER", help="the weights beside an adapter, where they have moved")
    text = parser.add_argument_group("perplexity")
    add = text.add_argument
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="text files, folders, .jsonl, .parquet, or the prefix of a prepared token file",
    )
    add("--window", type=whole_number(1), metavar="N", help="tokens that the model reads at once (its longest sequence)")
    add("--stride", type=whole_number(1), metavar="N", help="tokens that each later window scores (window: no overlap)")
    add("--join", action="store_true", help="score the documents as one stream instead of each alone")
    add("--text-column", default="text", metavar="NAME", help="column of the text in .jsonl and .parquet (text)")
    add("--pattern", default="*", metavar="GLOB", help="which files of a folder to read (*)")
    return parser
