"""The command line: the table of commands, and the one place where an error becomes a line and an exit code."""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from megalite.errors import MegaliteError
from megalite.launcher.detect import without_local_rank
from megalite.version import __version__

# Each has a module of its name here with `run(arguments) -> exit code`, imported only when it runs.
COMMANDS = {
    "train": "train a model, on ranks of its own or as a rank of a launcher",
    "generate": "continue a text with a trained model",
    "tokenizer": "train a tokenizer",
    "data": "turn text into token files, and look into them",
    "convert": "checkpoints for and from Hugging Face, DeepSpeed and Megatron-LM; a look into one",
    "selftest": "compare and time each operator on this machine's card, before runs use it",
    "doctor": "what is installed and detected here, and what would be used",
    "config": "show a run as it would start, and where each value came from",
}

_INTERRUPTED = 130
_PIPE_CLOSED = 141
_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 2 the user's input, 1 the run, 75 stopped to be resumed, 130 Ctrl-C.

    141: who read its output has closed it.
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
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        print(f"error: megalite has no command {name}; {hint}", file=sys.stderr)
        return _USER_ERROR
    try:
        code: int = import_module(f"megalite.cli.{name}").run(rest)
        sys.stdout.flush()
    except BrokenPipeError:
        # Its reader has seen enough, as `head` has; what is left unwritten must not be tried again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def overview() -> str:
    """The help of `megalite` itself."""
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
            "megalite COMMAND --help says more; megalite --version which one this is.",
        ]
    )
