"""megalite evaluate: measure a model's perplexity on text, or ask it tasks of EleutherAI's lm_eval."""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megalite.cli.evaluate_options import evaluate_parser, problems
from megalite.cli.inference_memory import InferenceMemory
from megalite.cli.local_ranks import on_local_ranks
from megalite.cli.results import report
from megalite.data.files.token_file import prepared_prefix
from megalite.data.text.corpus import Corpus
from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.errors import ConfigError, MegaliteError
from megalite.evaluate.documents import TextSource
from megalite.evaluate.report import table, write_json
from megalite.evaluate.task_list import load_tasks
from megalite.generation.layout_and_memory import cache_problems, inference_layout
from megalite.generation.prompts import Chat, chat_template
from megalite.generation.source import ModelSource, find_source
from megalite.monitor.work import working
from megalite.topology.shape import ModelShape
from megalite.version import __version__

if TYPE_CHECKING:
    from megalite.evaluate.perplexity import TextEvaluation
    from megalite.parallel.mesh import ParallelMesh


def run(arguments: Sequence[str]) -> int:
    """Print the figures; return the exit code. Raises CheckpointError, DataError, ConfigError."""
    options = command_parser().parse_args(arguments)
    source = find_source(options.model, tokenizer=options.tokenizer, base=options.base)
    layout = inference_layout(options)
    # Scored sequences have no cache, and the number of generated answers is not known yet.
    cache = (("--batch-size", options.batch_size), ("--batch-size", 0))
    too_large = cache_problems(source, options.dtype, *cache, layout=layout)
    if wrong := [*problems(options, layout, source.shape), *too_large]:
        raise ConfigError(wrong, "the request")
    if options.tasks:
        _require_lm_eval()
        _require_chat(options, source)
    elif prepared_prefix(options.data, "--data") is None:
        Corpus.open(options.data, pattern=options.pattern or "*", key="--data")
    # torch is imported below this line, so that --help and a wrong request are answered at once.
    preload = ["megalite.generation.text", "megalite.evaluate.perplexity", "megalite.evaluate.tasks"]
    window = ("--window", options.window or source.shape.longest_sequence)
    memory = InferenceMemory(source, layout, options.dtype, cache[0], window, cached=False)
    request = (source, options)
    return on_local_ranks(layout, _evaluate, request, name="evaluate", preload=preload, memory=memory)


def command_parser() -> argparse.ArgumentParser:
    return evaluate_parser(__doc__)


def _require_lm_eval() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise MegaliteError("--tasks needs lm_eval; install it: pip install 'megalite[evaluate]'")


def _require_chat(options: argparse.Namespace, source: ModelSource) -> None:
    """Raise DataError for --chat without a template, and note a model of conversations that is asked without it."""
    template = chat_template(source, options.chat_template)
    if options.chat:
        tokenizer = load_tokenizer(source.tokenizer, end_of_document=source.end_of_document)
        Chat(tokenizer, source.tokenizer, template)
    elif source.chat_template is not None:
        note = f"note: {source.folder} was trained on conversations; --chat asks in their form"
        print(note, file=sys.stderr, flush=True)


def _evaluate(request: tuple[ModelSource, argparse.Namespace], mesh: "ParallelMesh") -> int:
    """Load the model, measure it, and show the figures on rank 0."""
    from megalite.generation.loaded import load_shown

    source, options = request
    # Wrong tasks are named before the weights are read.
    tasks = (
        load_tasks(options.tasks, allow_code=options.allow_code) if options.tasks and not mesh.rank else []
    )
    loaded = load_shown(source, mesh, options.dtype)
    started = time.perf_counter()
    if options.data:
        from megalite.evaluate.perplexity import evaluate_text

        with working("evaluating", unit="windows", shown=mesh.rank == 0) as work:
            evaluation = _text_evaluation(options, loaded.config)
            figures = evaluate_text(loaded, evaluation, work.advance).as_dict()
        shown, results = table(figures), {"figures": figures}
    else:
        from megalite.evaluate.tasks import TaskEvaluation, evaluate_tasks, results_table

        names = ("num_fewshot", "limit", "gen_kwargs", "chat", "chat_template", "seed", "batch_size")
        asked = TaskEvaluation(**{name: getattr(options, name) for name in names})
        results = evaluate_tasks(loaded, tasks, asked) or {}
        shown = results_table(results) if results else ""
    seconds = time.perf_counter() - started
    if mesh.rank != 0:
        return 0
    print(f"{source.folder} on {', '.join(options.data or options.tasks)}\n{shown}", flush=True)
    print(f"evaluated in {seconds:.1f} s", file=sys.stderr, flush=True)
    settings = _settings(options) | {"dtype": str(loaded.model.dtype).removeprefix("torch.")}
    about = {"megalite": __version__, "model": str(source.folder), "settings": settings}
    document = {**about, **results, "seconds": round(seconds, 3)}
    report(**document)
    if options.output is not None:
        write_json(options.output, document)
    return 0


def _text_evaluation(options: argparse.Namespace, shape: ModelShape) -> "TextEvaluation":
    from megalite.evaluate.perplexity import TextEvaluation

    window = options.window or shape.longest_sequence
    source = TextSource(tuple(options.data), options.text_column or "text", options.pattern or "*")
    return TextEvaluation(source, window, options.stride or window, options.join, options.batch_size)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, for the record."""
    chosen = {name: value for name, value in vars(options).items() if value not in (None, False)}
    kept = {name: value for name, value in chosen.items() if name not in ("model", "output")}
    return {name: str(value) if hasattr(value, "parts") else value for name, value in kept.items()}
