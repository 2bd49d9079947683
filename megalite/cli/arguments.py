"""The parser of command-line arguments, and types of arguments, that the commands share."""

import argparse
import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any, NoReturn

_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)'")


class Parser(argparse.ArgumentParser):
    """argparse's parser with errors of one line, which suggest the command that was meant.

    The description may be the docstring of the command's module: its "megalite COMMAND: " is left out.
    """

    def __init__(self, *, prog: str, description: str | None = None, **settings: Any):
        text = (description or "").removeprefix(f"{prog}: ")
        super().__init__(prog=prog, description=text[:1].upper() + text[1:] or None, **settings)
        self._names: Collection[str] = ()

    def add_subparsers(self, **settings: Any) -> "argparse._SubParsersAction[Any]":
        """Add subcommands, of which one has to be named."""
        added = super().add_subparsers(**{"required": True, "metavar": "COMMAND", **settings})
        self._names = added.choices
        return added

    def error(self, message: str) -> NoReturn:
        """Print one line to stderr and exit with 2."""
        wrong = _INVALID_CHOICE.search(message)
        if wrong is not None and self._names:
            message = f"{self.prog} has no command {wrong[1]}; {meant(wrong[1], self._names)}"
        elif message.endswith(": COMMAND") and self._names:
            message = f"{self.prog} needs a command; use one of {', '.join(self._names)}"
        else:
            message = f"{self.prog}: {message}; {self.prog} --help shows the options"
        self.exit(2, f"error: {message}\n")


def meant(word: str, known: Collection[str]) -> str:
    """Return a remedy for an unknown word: the closest of the known ones, or all of them."""
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return parse
