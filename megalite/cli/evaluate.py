"""megalite evaluate: measure a model's perplexity on text, or its accuracy on a local task file."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalite.cli.evaluate_options import MEBIBYTES, SAMPLES, SECONDS, TOKENS, evaluate_parser, problems
from megalite.cli.local_ranks import on_local_ranks
from megalite.data.files.token_file import prepared_prefix
from megalite.data.text.corpus import Corpus
from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.errors import ConfigError, Problem
from megalite.evaluate.documents import TextSource
from megalite.evaluate.questions import ChoiceQuestion, CodeProblem
from megalite.evaluate.report import table, write_json
from megalite.evaluate.sandbox import Limits
from megalite.evaluate.task_file import TaskFile, questions
from megalite.generation.memory import cache_problems
from megalite.generation.prompts import Chat, chat_template
from megalite.generation.request import Sampling
from megalite.generation.source import ModelSource, find_source
from megalite.monitor.work import working
from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape
from megalite.version import __version__

if TYPE_CHECKING:
    from megalite.evaluate.perplexity import TextEvaluation
    from megalite.evaluate.task import TaskEvaluation
    from megalite.generation.loaded import LoadedModel
    from megalite.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class _Request:
    """The arguments that every rank gets. source: None where the completions of programs are given."""

    source: ModelSource | None
    layout: Layout
    options: argparse.Namespace
    items: int | None
    """The number of choices or answers of a task, for its progress."""

    @property
    def model(self) -> str:
        return "given samples" if self.source is None else str(self.source.folder)


def run(arguments: Sequence[str]) -> int:
    """Print the figures; return the exit code. Raises CheckpointError, DataError, ConfigError."""
    options = evaluate_parser(__doc__).parse_args(arguments)
    source = None
    if options.model is not None and options.samples_file is None:
        source = find_source(options.model, tokenizer=options.tokenizer, base=options.base)
    layout = Layout(pipeline=options.pipeline, data=options.data_parallel, tensor=options.tensor)
    found = list(problems(options, layout, None if source is None else source.shape))
    if found:
        raise ConfigError(found, "the request")
    items = _require_files(options)
    if source is not None and (found := list(_too_large(options, source, items))):
        raise ConfigError(found, "the request")
    if source is not None and options.kind in ("multiple_choice", "exact_match"):
        _require_chat(options, source)
    # torch is imported below this line, so that --help and a wrong request are answered at once.
    preload = ["megalite.generation.text", "megalite.evaluate.perplexity", "megalite.evaluate.task"]
    return on_local_ranks(
        layout, _evaluate, _Request(source, layout, options, items), name="evaluate", preload=preload
    )


def _require_chat(options: argparse.Namespace, source: ModelSource) -> None:
    """Raise DataError for --chat without a template, and note a model of conversations that is asked without it."""
    template = chat_template(source, options.chat_template)
    if options.chat:
        tokenizer = load_tokenizer(source.tokenizer, end_of_document=source.end_of_document)
        Chat(tokenizer, source.tokenizer, template)
    elif source.chat_template is not None:
        _note(f"note: {source.folder} was trained on conversations; --chat asks in their form")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _too_large(options: argparse.Namespace, source: ModelSource, items: int | None) -> Iterator[Problem]:
    """Yield the problem of a model, or of a batch, that cannot fit this machine. items: as in _Request."""
    slots, tokens = options.batch_size, 0
    if options.kind in ("exact_match", "code") and items is not None:
        # Only answers are generated with a cache; the length of their prompts is not known yet.
        slots, tokens = min(slots, -(-items // options.data_parallel)), options.tokens or TOKENS
    return cache_problems(source, options.dtype, ("--batch-size", slots), ("--tokens", tokens))


def _require_files(options: argparse.Namespace) -> int | None:
    """Return the number of choices or answers of a task.

    Raises DataError for a text that does not exist, and for any row of a task that is wrong.
    """
    if options.data:
        if prepared_prefix(options.data, "--data") is None:
            Corpus.open(options.data, pattern=options.pattern or "*", key="--data")
        return None
    file, examples = _task_files(options)
    asked = questions(file, _note)
    if examples is not None:
        questions(examples, _note)
    if options.samples_file is not None:
        from megalite.evaluate.code import read_samples

        read_samples(options.samples_file, [each for each in asked if isinstance(each, CodeProblem)], _note)
    if options.kind == "code":
        return len(asked) * (options.samples or SAMPLES)
    return sum(len(question.choices) if isinstance(question, ChoiceQuestion) else 1 for question in asked)


def _evaluate(request: _Request, mesh: "ParallelMesh") -> int:
    """Load the model, measure it, and show the figures on rank 0."""
    options = request.options
    loaded = None if request.source is None else _loaded(request.source, mesh, options.dtype)
    started = time.perf_counter()
    unit = "windows" if options.data else "choices" if options.kind == "multiple_choice" else "answers"
    with working("evaluating", unit=unit, total=request.items, shown=mesh.rank == 0) as work:
        if options.data:
            from megalite.evaluate.perplexity import evaluate_text

            assert loaded is not None
            evaluation = _text_evaluation(options, loaded.config)
            figures = evaluate_text(loaded, evaluation, work.advance).as_dict()
        else:
            from megalite.evaluate.task import evaluate_task

            figures = evaluate_task(loaded, _task_evaluation(options), work.advance)
    seconds = time.perf_counter() - started
    if mesh.rank != 0:
        return 0
    subject = ", ".join(options.data) if options.data else str(options.task)
    print(f"{request.model} on {subject}\n{table(figures)}", flush=True)
    print(f"evaluated in {seconds:.1f} s", file=sys.stderr, flush=True)
    if options.output is not None:
        about = {"megalite": __version__, "model": request.model, "settings": _settings(options)}
        write_json(options.output, {**about, "figures": figures, "seconds": round(seconds, 3)})
    return 0


def _loaded(source: ModelSource, mesh: "ParallelMesh", dtype: str) -> "LoadedModel":
    import torch

    from megalite.generation.loaded import load_source

    with working(f"loading {source.folder}", shown=mesh.rank == 0):
        return load_source(source, mesh, getattr(torch, dtype))


def _text_evaluation(options: argparse.Namespace, shape: ModelShape) -> "TextEvaluation":
    from megalite.evaluate.perplexity import TextEvaluation

    window = options.window or shape.longest_sequence
    source = TextSource(tuple(options.data), options.text_column or "text", options.pattern or "*")
    return TextEvaluation(source, window, options.stride or window, options.join, options.batch_size)


def _task_evaluation(options: argparse.Namespace) -> "TaskEvaluation":
    from megalite.evaluate.task import CodeEvaluation, TaskEvaluation

    seed = options.seed or 0
    file, examples = _task_files(options)
    top_p = 1.0 if options.top_p is None else options.top_p
    code = CodeEvaluation(
        options.samples or SAMPLES,
        tuple(sorted(set(options.k or [1]))),
        Sampling(options.temperature or 0.0, 0, top_p, seed),
        Limits(options.timeout or SECONDS, (options.memory or MEBIBYTES) << 20),
        options.samples_file,
    )
    few_shot, tokens = options.few_shot or 0, options.tokens or TOKENS
    return TaskEvaluation(
        file,
        examples,
        few_shot,
        seed,
        tokens,
        options.batch_size,
        code,
        options.chat,
        options.chat_template,
        options.few_shot_turns,
    )


def _task_files(options: argparse.Namespace) -> tuple[TaskFile, TaskFile | None]:
    columns = dict(options.field or [])
    file = TaskFile(options.task, options.kind, options.form, columns, options.limit)
    if options.few_shot_file is None:
        return file, None
    flag = "--few-shot-file"
    return file, TaskFile(options.few_shot_file, options.kind, options.form, columns, flag=flag)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, for the record."""
    given = {name: value for name, value in vars(options).items() if value not in (None, False)}
    kept = {name: value for name, value in given.items() if name not in ("model", "output", "field")}
    columns = {"field": dict(options.field)} if options.field else {}
    return {name: str(value) if hasattr(value, "parts") else value for name, value in kept.items()} | columns
