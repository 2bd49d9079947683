"""Types of command-line arguments that several commands share."""

import argparse
from collections.abc import Callable


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return parse
