"""megalite generate: continue texts with a checkpoint or a Hugging Face folder, on one or more ranks."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megalite.cli.arguments import (
    Parser,
    add_adapters,
    add_chat_template,
    add_model,
    add_value,
    flag,
    whole_number,
)
from megalite.cli.generate_chat import CLEAR, chat
from megalite.cli.generate_run import GenerationJob, continue_prompt, run_file
from megalite.cli.inference_memory import InferenceMemory
from megalite.cli.local_ranks import on_local_ranks
from megalite.cli.results import wanted
from megalite.errors import ConfigError, DataError, Problem
from megalite.generation.layout_and_memory import (
    DEFAULT_TOKENS,
    cache_problems,
    inference_layout,
    layout_problems,
)
from megalite.generation.request import Request, Sampling, check_request, sampling_problems
from megalite.generation.source import ModelSource, find_source
from megalite.topology.shape import ModelShape


def run(arguments: Sequence[str]) -> int:
    """Print texts as they are made; return the exit code. Raises CheckpointError, DataError, ConfigError."""
    options = command_parser().parse_args(arguments)
    if options.adapter and options.batch is None:
        folder = next(iter(options.adapter.values()))
        remedy = f"name the adapter's folder as MODEL, which merges it: {folder}"
        if not folder.is_dir():
            remedy = f"name an adapter's folder as MODEL, which merges it; {folder} is no folder"
        raise ConfigError([Problem("--adapter", "is for --batch", remedy)], "the request")
    source = find_source(
        options.model, tokenizer=options.tokenizer, base=options.base, adapters=options.adapter
    )
    _check(options, source.shape)
    job = _job(options, source)
    if too_large := list(cache_problems(source, job.dtype, *_cache_size(job), layout=job.layout)):
        raise ConfigError(too_large, "the request")
    if job.task == "chat" and job.layout.world_size > 1:  # the standard input of a forked rank is closed
        job = replace(job, keyboard=os.dup(sys.stdin.fileno()))
    memory = generation_memory(job)
    preload = ["megalite.generation.text"]
    return on_local_ranks(job.layout, _TASKS[job.task], job, name="generate", preload=preload, memory=memory)


_TASKS = {"prompt": continue_prompt, "batch": run_file, "chat": chat}


def _job(options: argparse.Namespace, source: ModelSource) -> GenerationJob:
    """Return what every rank gets; every request is checked here. Raises ConfigError, DataError."""
    from megalite.data.tokenizers.tokenizer import load_tokenizer
    from megalite.generation.prompts import Chat, chat_template, prompt_ids
    from megalite.generation.request_file import read_requests
    from megalite.generation.stops import stops_of

    tokenizer = load_tokenizer(source.tokenizer, end_of_document=source.end_of_document)
    stops, stop = stops_of(source, tokenizer), tuple(options.stop)
    first = Request((), options.tokens, Sampling.of(vars(options)), stops.ids, stop, options.logprobs)
    layout = inference_layout(options)
    job = GenerationJob("prompt", source, layout, options.dtype, first, max_requests=options.max_requests)
    template = None if options.prompt is not None else chat_template(source, options.chat_template)
    if options.chat:
        Chat(tokenizer, source.tokenizer, template)  # raises the error of a model without a template
        return replace(job, task="chat", template=template)
    if options.batch is not None:
        requests = tuple(read_requests(options.batch, first, source, tokenizer, template))
        if options.output is not None and not options.output.parent.is_dir():
            raise DataError(f"the folder of --output {options.output} does not exist; create it")
        return replace(job, task="batch", file=requests, output=options.output)
    prompt = tuple(prompt_ids(tokenizer, options.prompt))
    request = replace(first, prompt_ids=prompt, stop=(*stop, *stops.texts))
    try:
        check_request(request, source.shape, source.shape.longest_sequence)
    except ConfigError as error:
        problems = [
            replace(problem, key=flag(problem.key), set={flag(key): new for key, new in problem.set.items()})
            for problem in error.problems
        ]
        raise ConfigError(problems, error.source) from error
    return replace(job, request=request, prompt=options.prompt)


def generation_memory(job: GenerationJob) -> InferenceMemory:
    """Return the memory that the job needs on its accelerators."""
    # A chat keeps its whole context, whatever --tokens says.
    settable = 0 if job.task == "chat" else job.request.max_tokens
    return InferenceMemory(job.source, job.layout, job.dtype, *_cache_size(job), settable=settable)


def _cache_size(job: GenerationJob) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return the flag and the value of the requests at a time, and of the tokens of each."""
    slots, tokens = ("--tokens", 1), len(job.request.prompt_ids) + job.request.max_tokens
    if job.task == "batch":
        slots = ("--max-requests", min(job.max_requests, len(job.file)))
        tokens = max(len(each.request.prompt_ids) + each.request.max_tokens for each in job.file)
    elif job.task == "chat":
        tokens = min(DEFAULT_TOKENS, job.source.shape.longest_sequence)
    return slots, ("--tokens", tokens)


def _check(options: argparse.Namespace, shape: ModelShape) -> None:
    """Raise ConfigError for a layout that the model does not fit, or wrong sampling options."""
    problems = list(layout_problems(inference_layout(options), shape))
    if options.chat and wanted():
        remedy = "use --prompt or --batch, or megalite serve"
        problems.append(Problem("--json", "is not for --chat, a conversation with a person", remedy))
    if options.output is not None and options.batch is None:
        problems.append(Problem.reset("--output", "is for --batch", "leave it out"))
    if options.chat_template is not None and options.prompt is not None:
        problems.append(Problem.reset("--chat-template", "is for --chat and --batch", "leave it out"))
    problems += sampling_problems(
        options.tokens, vars(options), flag, stop=options.stop, logprobs=options.logprobs
    )
    if options.beams is not None:
        message = "beam search is the job of transformers"
        remedy = "megalite convert export MODEL FOLDER, and then model.generate(num_beams=N) on FOLDER"
        problems.append(Problem("--beams, --length-penalty", message, remedy))
    if problems:
        raise ConfigError(problems, "the request")


_COMMON = (
    *("model", "--prompt", "--batch", "--chat", "--tokens", "--temperature", "--top-p", "--stop", "--seed"),
    *("--dtype", "--tensor", "--pipeline", "--context", "--base"),
)


def command_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megalite generate", description=__doc__, common=_COMMON)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    add_value(task, "--batch", Path, "FILE", "JSON lines of requests; prints results as JSON lines")
    task.add_argument(
        "--chat", action="store_true", help=f"talk to the model until Ctrl-D; {CLEAR} forgets all"
    )
    add_value(parser, "--output", Path, "FILE", "the file for the results of --batch (standard output)")
    add_value(parser, "--max-requests", whole_number(1), "N", "requests at a time in --batch", 16)
    _add_sampling(parser)
    add_chat_template(parser)
    add_model(parser)
    add_adapters(parser)
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "--tokens", whole_number(1), "N", "maximum number of new tokens", 64)
    add_value(parser, "--temperature", float, "T", "sampling temperature; 0: greedy", 0.0)
    add_value(parser, "--top-k", whole_number(1), "K", "sample only from the K most likely tokens")
    add_value(parser, "--top-p", float, "P", "sample from the fewest tokens with total probability P")
    about = "sample from tokens at least P times as likely as the most likely one"
    add_value(parser, "--min-p", float, "P", about)
    about = "divide positive logits of earlier tokens, the prompt's too, by X and multiply negative ones"
    add_value(parser, "--repetition-penalty", float, "X", about, 1.0)
    about = "subtract X from the logit of each new token that was used"
    add_value(parser, "--presence-penalty", float, "X", about, 0.0)
    about = "subtract X from the logit of a new token each time it was used"
    add_value(parser, "--frequency-penalty", float, "X", about, 0.0)
    parser.add_argument("--beams", "--length-penalty", help=argparse.SUPPRESS)
    about = "end before this text; may be repeated"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=about)
    about = "print each token's log probability and the N most likely tokens (0 to 20)"
    add_value(parser, "--logprobs", int, "N", about)
    add_value(parser, "--seed", int, "N", "random seed", 0)
