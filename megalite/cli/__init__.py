"""The command line. Importing this module costs nothing: `main` imports the commands where it can answer Ctrl-C."""

from collections.abc import Sequence

_INTERRUPTED = 130  # as in megalite.launcher.exit_codes, whose import Ctrl-C could interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done. 1: the run failed. 2: wrong input, or a full disk. 75: stopped and saved, to be resumed. 76: stopped before
    there was anything to save. 130: Ctrl-C. 141: stdout was closed. 143: ended by a signal, without a save. With --json
    stdout has one JSON document.
    """
    try:
        from megalite.cli.commands import run_command

        return run_command(argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
