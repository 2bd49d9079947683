"""The table of commands, and the one place that turns an error into a message and an exit code."""

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from megalite.cli import results
from megalite.cli.arguments import EVERYTHING, JSON, closest, meant
from megalite.errors import MegaliteError, Problem, disk_error
from megalite.launcher.exit_codes import INTERRUPTED
from megalite.launcher.process import unwritten_output_dropped
from megalite.launcher.rank.local_rank import without_local_rank
from megalite.version import __version__

# Command -> description. Each is a module here with `run(arguments) -> exit code`, imported only when it runs.
COMMANDS = {
    "init": "write a RUN.toml for your text; asks three questions",
    "train": "train a model on this machine, or as one rank of a launcher",
    "top": "watch runs: loss, speed, time left, checkpoints, alarms",
    "plan": "predict memory, speed and days on a cluster, and rank layouts",
    "verify": "compare a run's layout with one process, tensor by tensor",
    "sweep": "train a run with many values of its settings, and compare",
    "scaling": "fit a scaling law to a ladder of small models",
    "report": "write an HTML page about runs: curves, settings, memory, alarms",
    "launch": "start a run on several hosts, and supervise it",
    "generate": "continue a text with a trained model",
    "evaluate": "measure perplexity on text, or ask the tasks of lm_eval",
    "serve": "answer HTTP requests with a model, in OpenAI's form",
    "config": "show a run's resolved settings, or the presets",
    "tokenizer": "train or convert a tokenizer",
    "data": "tokenize text into token files, and inspect them",
    "adopt": "write a RUN.toml from another program's script or settings",
    "convert": "export, import and inspect checkpoints of this and other programs",
    "doctor": "show what is installed here and what a run would use",
    # In one line of the overview, which is one screen.
    "chaos": "",
    "completion": "",
    "examples": "",
    "selftest": "",
    "timeline": "",
}

_PIPE_CLOSED = 141
_USER_ERROR = 2


def run_command(argv: Sequence[str] | None) -> int:
    """Run one command and return its exit code, one of those that `megalite.cli.main` lists."""
    # A collection at the end of the process looks at all objects of torch: three to six seconds on a busy machine.
    atexit.register(gc.freeze)
    words = list(sys.argv[1:] if argv is None else argv)
    own = words[: words.index("--")] if "--" in words else words
    if JSON not in own:
        return _run(words)
    kept = [word for word in own if word != JSON] + words[len(own) :]
    return results.with_document(lambda: _run(kept))


def _run(words: Sequence[str]) -> int:
    code = 0
    try:
        code = _called(words)
        with unwritten_output_dropped(of_full_disk=False):
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe.
        _discard(sys.stdout)
        return code or _PIPE_CLOSED
    except OSError as error:
        if (refused := disk_error(error)) is None:
            raise
        return _refused(refused, code)
    except MegaliteError as error:
        return _refused(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _called(words: Sequence[str]) -> int:
    name, *rest = without_local_rank(words) or ["--help"]
    if name == "help" and rest:
        name, rest = rest[0], _as_help(rest)
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name in ("-V", "--version"):
        print(f"megalite {__version__}")
        return 0
    if name not in COMMANDS:
        close = closest(name, COMMANDS)
        problem = Problem(
            "COMMAND",
            f"megalite has no command {name}",
            meant(name, COMMANDS),
            {"COMMAND": close} if close else {},
            value=name,
        )
        print(f"error: {problem.message}; {problem.remedy}", file=sys.stderr)
        results.report_error((problem,), problem.message, _USER_ERROR)
        return _USER_ERROR
    code: int = import_module(f"megalite.cli.{name}").run(rest)
    return code


def _refused(error: MegaliteError, code: int = 0) -> int:
    """Print an error, and return its exit code, or that with which the command had ended before."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, f"error: {error}\n")):
        try:
            stream.write(text)
            stream.flush()
        except OSError:  # it is in a file on the same full disk
            _discard(stream)
    results.error_of(error)
    return code or error.exit_code


def _discard(stream: TextIO) -> None:
    """Send the rest of a stream to nowhere: at exit Python would flush it again and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _as_help(words: Sequence[str]) -> list[str]:
    """Return the arguments that ask a command for help: `help data prepare` is `data prepare --help`."""
    command, *topic = words
    # The words behind `help train` are sections of the settings, those behind other commands their subcommands.
    if command == "train" or topic == [EVERYTHING]:
        return ["--help", *topic]
    return [*topic, "--help"]


def overview() -> str:
    """Return the help text of `megalite` itself."""
    width = max(map(len, COMMANDS)) + 2
    commands = [f"  {name:<{width}}{line}" for name, line in COMMANDS.items() if line]
    others = ", ".join(name for name, line in COMMANDS.items() if not line)
    return "\n".join(
        [
            f"megalite {__version__}: a 3D-parallel runtime for training large language models",
            "",
            *commands,
            f"  {'also':<{width}}{others}",
            "",
            "  megalite train --data.source book.txt    a first model, in minutes",
            "  megalite COMMAND --help                  its options; --json for programs",
        ]
    )
