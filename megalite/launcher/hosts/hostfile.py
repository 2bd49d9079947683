"""Reads a hostfile in DeepSpeed's format, `NAME slots=N` on each line, strictly: every problem at once."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalite.errors import LaunchError, Problem, problem_list

EXAMPLE = "node-a slots=8"
MOST_SLOTS = 4096

_WORD = re.compile(r"[^ \t]+")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_SLOTS = re.compile(r"slots=([0-9]+)")


@dataclass(frozen=True)
class Host:
    """A machine: its name as ssh and SLURM know it, and the numbers of its slots. Each slot can run one rank."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a hostfile in its order. Lines may end in CRLF; `#` begins a comment.

    Raises LaunchError with every problem, each with its line, column and text; also for a file that is missing,
    unreadable or without hosts.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise LaunchError(
            f"--hostfile {path}: there is no such file; write one line like `{EXAMPLE}` for each host, or leave out "
            "--hostfile to use this machine only"
        ) from None
    except OSError as error:
        raise LaunchError(f"--hostfile {path}: the file cannot be read: {error.strerror}") from None
    hosts: list[Host] = []
    problems: list[Problem] = []
    first: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        words = [(match.start() + 1, match.group()) for match in _WORD.finditer(_content(line))]
        if not words:
            continue
        name, line_problems = words[0][1], list(_problems(number, words))
        if name.lower() in first:
            message = f"{name!r} is named twice, first in line {first[name.lower()]}"
            line_problems.append(Problem(_place(number, words[0][0]), message, "keep one line for each host"))
        first.setdefault(name.lower(), number)
        problems += line_problems
        if not line_problems:
            hosts.append(Host(name, tuple(range(_count(words)))))
    if not hosts and not problems:
        problems = [Problem("line 1", "the file names no host", f"write one line like `{EXAMPLE}` for each")]
    if problems:
        raise LaunchError(problem_list(problems, f"the hostfile {path}"))
    return tuple(hosts)


def problem_of_name(name: str) -> tuple[str, str]:
    """Return what is wrong with the name of a host, and the remedy; ("", "") for a name that every backend takes."""
    if _NAME.fullmatch(name):
        return "", ""
    if name.startswith("-"):
        return "begins with -, and ssh would read it as an option", "write the name of a host"
    if "@" in name:
        return "names a user", f"write {name.rpartition('@')[2]!r}, and set User in ~/.ssh/config for it"
    if name.count(":") > 1:
        return "is an IPv6 address", "give it a name in /etc/hosts, and write the name"
    if "[" in name or "," in name:
        return "stands for several hosts", "write one line for each host"
    if ":" in name:
        host, _, rest = name.partition(":")
        remedy = f"write `{host} slots={rest}`" if re.fullmatch("[0-9]+", rest) else f"write `{host} slots=N`"
        return "has a colon, which is not DeepSpeed's format", remedy
    return "is not the name of a host", "use ASCII letters, digits, '.', '-' and '_'"


def _content(line: str) -> str:
    """Return a line without its comment and the CR of a CRLF."""
    return line.removesuffix("\r").partition("#")[0]


def _place(number: int, column: int) -> str:
    return f"line {number}, column {column}"


def _count(words: list[tuple[int, str]]) -> int:
    slots = _SLOTS.fullmatch(words[1][1])
    return int(slots[1]) if slots else 0


def _problems(number: int, words: list[tuple[int, str]]) -> Iterator[Problem]:
    """Yield the problems of one line; words: (column, text)."""
    (column, name), *rest = words
    wrong, remedy = problem_of_name(name)
    if wrong:
        yield Problem(_place(number, column), f"{name!r} {wrong}", remedy)
    if not rest:
        # `host:2` has been answered with its slots.
        if ":" not in name:
            yield Problem(
                _place(number, column + len(name)), f"{name!r} has no slots", f"write `{name} slots=N`"
            )
        return
    column, slots = rest[0]
    text = " ".join(word for _, word in rest)
    if re.match(r"slots *= *[0-9]+$", text) and len(rest) > 1:
        yield Problem(_place(number, column), f"{text!r} has spaces", f"write `{text.replace(' ', '')}`")
        return
    wrong, remedy = _problem_of_slots(slots)
    if wrong:
        yield Problem(_place(number, column), f"{slots!r} {wrong}", remedy)
    for column, word in rest[1:2]:
        message = f"{word!r} stands behind the slots"
        yield Problem(_place(number, column), message, f"remove it, or write `# {word}` for a comment")


def _problem_of_slots(word: str) -> tuple[str, str]:
    """Return what is wrong with `slots=N`, and the remedy; ("", "") if nothing is."""
    slots = _SLOTS.fullmatch(word)
    if slots is None:
        return "is not a number of slots", "write `slots=N`, with N the number of ranks on the host"
    if int(slots[1]) == 0:
        return "leaves the host without ranks", "use 1 or more, or put # before the line"
    if int(slots[1]) > MOST_SLOTS:
        return f"is more than {MOST_SLOTS}", "write the number of the host's GPUs"
    return "", ""
