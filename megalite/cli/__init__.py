"""The command line: the table of commands, and the one place that turns an error into a message and an exit code."""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from megalite.errors import MegaliteError
from megalite.launcher.detect import without_local_rank
from megalite.version import __version__

# Command -> description. Each is a module here with `run(arguments) -> exit code`, imported only when it runs.
COMMANDS = {
    "train": "train a model, starting its own ranks or as one rank of a launcher",
    "generate": "continue a text with a trained model",
    "tokenizer": "train or convert a tokenizer",
    "data": "tokenize text into token files, and inspect them",
    "convert": "export, import and inspect checkpoints: Hugging Face, DeepSpeed, Megatron-LM",
    "selftest": "check each operator against float64 on this machine's device, and time it",
    "doctor": "show what is installed and detected, and what a run would use",
    "examples": "copy the examples and launch scripts into a folder",
    "config": "show a run's resolved settings and where each value comes from",
}

_INTERRUPTED = 130
_PIPE_CLOSED = 141
_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done. 1: the run failed. 2: wrong input. 75: stopped, to be resumed. 130: Ctrl-C. 141: stdout was closed.
    """
    name, *rest = without_local_rank(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name in ("-V", "--version"):
        print(f"megalite {__version__}")
        return 0
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(COMMANDS)}"
        print(f"error: megalite has no command {name}; {hint}", file=sys.stderr)
        return _USER_ERROR
    try:
        code: int = import_module(f"megalite.cli.{name}").run(rest)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe. At exit Python would flush stdout again and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def overview() -> str:
    """Return the help text of `megalite` itself."""
    width = max(map(len, COMMANDS)) + 2
    commands = [f"  {name:<{width}}{line}" for name, line in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megalite COMMAND ...",
            "",
            "A 3D-parallel runtime for training large language models.",
            "",
            *commands,
            "",
            "megalite COMMAND --help shows a command's options; megalite --version the version.",
        ]
    )
