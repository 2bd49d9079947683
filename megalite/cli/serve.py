"""megalite serve: answer HTTP requests with a model, in the form of OpenAI's interface, on one or more ranks."""

import argparse
import importlib.util
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.cli.arguments import (
    Parser,
    add_adapters,
    add_chat_template,
    add_model,
    add_value,
    flag,
    whole_number,
)
from megalite.cli.inference_memory import InferenceMemory
from megalite.cli.local_ranks import on_local_ranks
from megalite.cli.results import report_now
from megalite.config.sections.shape_settings import longest_sequence_setting
from megalite.errors import ConfigError, Problem
from megalite.generation.layout_and_memory import (
    DEFAULT_TOKENS,
    cache_problems,
    inference_layout,
    layout_problems,
)
from megalite.generation.source import ModelSource, find_source
from megalite.launcher.rank.environment import api_key
from megalite.serve.settings import ServePlan, ServeSettings

if TYPE_CHECKING:
    from megalite.parallel.mesh import ParallelMesh

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code.

    Raises ConfigError, CheckpointError, DataError and LaunchError for wrong input, RankFailure if a rank died.
    """
    options = command_parser().parse_args(arguments)
    _require_packages()
    from megalite.generation.prompts import chat_template
    from megalite.serve.address import listen
    from megalite.serve.keys import read_keys

    settings = ServeSettings(
        host=options.host,
        port=options.port,
        keys=read_keys(options.api_key_file, api_key(), options.host),
        cors_origins=tuple(options.cors_origin),
        **{name: getattr(options, name) for name in _LIMITS},
    )
    source = find_source(
        options.model, tokenizer=options.tokenizer, base=options.base, adapters=options.adapter
    )
    layout = inference_layout(options)
    name = options.model_name or source.folder.resolve().name
    problems = [*layout_problems(layout, source.shape), *_length_problems(options.context_length, source)]
    context = min(options.context_length or DEFAULT_TOKENS, source.shape.longest_sequence)
    cache = ("--max-requests", options.max_requests), ("--context-length", context)
    problems += cache_problems(source, options.dtype, *cache, layout=layout)
    if name in source.adapters:
        message = f"{name!r} is the name of the base model, too"
        problems.append(Problem("--adapter", message, "choose another, or name the base with --model-name"))
    if problems:
        raise ConfigError(problems, "the server")
    if layout.world_size > 1 and settings.port:
        # A rank binds it later: here a taken one is an error of the input, before a rank is started.
        for opened in listen(settings):
            opened.close()
    template = chat_template(source, options.chat_template)
    plan = ServePlan(source, settings, name, template, options.dtype, options.context_length)
    memory = InferenceMemory(source, layout, options.dtype, *cache)
    preload = ["megalite.serve.run"]
    return on_local_ranks(layout, _serve, plan, name="serve", preload=preload, memory=memory)


def _serve(plan: "ServePlan", mesh: "ParallelMesh") -> int:
    """Serve on rank 0; the other ranks take part in its steps until it ends."""
    if mesh.rank > 0:
        # Rank 0 drains its requests, for which it needs the others, and then ends them.
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    from megalite.serve.run import serve

    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s")
    logging.getLogger("megalite.serve").setLevel(logging.INFO)

    def ready(port: int) -> None:
        host = f"[{plan.settings.host}]" if ":" in plan.settings.host else plan.settings.host
        print(f"{plan.name} at http://{host}:{port}", flush=True)
        if not plan.settings.keys:
            print("no API key: requests from this machine only", flush=True)
        report_now(url=f"http://{host}:{port}", model=plan.name, host=plan.settings.host, port=port)

    serve(plan, mesh, ready)
    return 0


def _length_problems(length: int | None, source: ModelSource) -> Iterator[Problem]:
    """Yield the problem of a context that is longer than the model's."""
    longest = source.shape.longest_sequence
    if length is not None and length > longest:
        message = f"{length} is longer than {longest_sequence_setting(source.shape)} = {longest}"
        yield Problem.reset("--context-length", message, f"use at most {longest}", longest)


def _require_packages() -> None:
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        message = f"needs {', '.join(missing)}, which this Python does not have"
        raise ConfigError(
            [Problem("megalite serve", message, "install them: pip install 'megalite[serve]'")],
            "the installation",
        )


_COMMON = (
    *("model", "--host", "--port", "--api-key-file", "--chat-template", "--dtype", "--tensor", "--pipeline"),
    *("--context", "--max-requests", "--context-length"),
)


def command_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megalite serve", description=__doc__, common=_COMMON)
    add_value(
        parser, "--host", str, "NAME", "address to listen at; another one needs a key", ServeSettings.host
    )
    add_value(parser, "--port", whole_number(0, 65535), "N", "port; 0: any free one", ServeSettings.port)
    add_value(parser, "--api-key-file", Path, "FILE", "API keys, one a line; also from $MEGALITE_API_KEY")
    about = "site whose pages may send requests, such as https://example.org; *: all; repeatable (none)"
    parser.add_argument("--cors-origin", type=_origin, action="append", default=[], metavar="URL", help=about)
    add_value(parser, "--model-name", str, "NAME", "the model's name in requests (default: of its folder)")
    add_chat_template(parser)
    add_model(parser)
    add_adapters(parser)
    for name, (parse, metavar, about) in _LIMITS.items():
        add_value(parser, flag(name), parse, metavar, about, getattr(ServeSettings, name))
    about = "most tokens of prompt and answer (the model's, at most 4096)"
    add_value(parser, "--context-length", whole_number(2), "N", about)
    return parser


def _origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the origin of a page: write * or scheme://host[:port], without a path"
        )
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


# Fields of ServeSettings -> type, metavar and help of their options.
_LIMITS: Mapping[str, tuple[Callable[[str], Any], str, str]] = {
    "max_requests": (whole_number(1), "N", "sequences generated at a time"),
    "max_queue": (whole_number(0), "N", "sequences that wait; then 429"),
    "max_tokens": (whole_number(1), "N", "most new tokens of a sequence"),
    "max_body_bytes": (whole_number(1), "N", "largest request body"),
    "max_connections": (whole_number(1), "N", "most open connections"),
    "request_seconds": (_seconds, "S", "time limit of a request"),
    "drain_seconds": (_seconds, "S", "time of running requests after SIGTERM"),
}
