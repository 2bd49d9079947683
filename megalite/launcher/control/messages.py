"""The messages between the ranks of a job and its coordinator: one JSON object a line, checked as untrusted input."""

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.errors import LaunchError, listed

LINE_BYTES = 2**20
"""The longest line that is read; a resolved configuration takes about 10 kB."""

MOST_NAMED = 64
"""The most hosts, or ranges of ranks, that a text names."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""The signals that the coordinator passes on to every rank."""

# kind -> field -> type. A message with another kind, a missing field or another type is malformed.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    # from a rank
    "hello": {"job": str, "nonce": str, "rank": int, "world_size": int, "host": str, "pid": int},
    # facts: a table as JSON, so that what all ranks say alike is read once (`facts_from`)
    "facts": {"name": str, "about": str, "facts": str},
    "announce": {"name": str, "value": (str, int, float, list, dict, type(None))},
    "alive": {"step": (int, type(None)), "activity": str, "marks": dict},
    "stack": {"text": str},
    "failed": {"report": dict, "sent": (int, float)},
    "stop": {"text": str, "exit_code": int},
    "leave": {"exit_code": int},
    "hosts": {},
    # from the coordinator
    "joined": {"address": str},
    "refused": {"reason": str, "final": bool},
    "value": {"name": str, "value": (str, int, float, list, dict, type(None))},
    "signal": {"number": int},
    "where": {},
    "heard": {},
    "verdict": {"text": str, "exit_code": int, "rank": int, "host": str},
}


class MessageError(LaunchError):
    """A line that no rank and no coordinator of this version sends."""


@dataclass(frozen=True)
class Hello:
    """The identity of a rank, with which it opens its connection."""

    rank: int
    world_size: int
    host: str
    pid: int
    job: str = ""
    nonce: str = ""


@dataclass(frozen=True)
class Verdict:
    """Why a job ended before its ranks had left: the first cause, for the user.

    rank, host: the rank at fault and its host; -1 and "" if no single rank is at fault. coordinator_lost: why this
    rank has lost the coordinator, which can say nothing any more; "" if it has not.
    """

    text: str
    exit_code: int = 1
    rank: int = -1
    host: str = ""
    coordinator_lost: str = ""


def encode(kind: str, **fields: Any) -> bytes:
    """Return a message as a line."""
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the fields of a message with its "kind". Raises MessageError for anything but a known message."""
    try:
        message: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a line of {len(line)} bytes is not JSON") from error
    kind = message.get("kind") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(kind, str) or kind not in _FIELDS:
        raise MessageError(f"a line of {len(line)} bytes is not a message of a rank")
    for name, expected in _FIELDS[kind].items():
        value = message.get(name, _MISSING)
        # True is an int in Python.
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise MessageError(f"{kind}: the field {name} is missing or has another type")
    if kind == "signal" and message["number"] not in PASSED_ON:
        raise MessageError(f"signal: the number {message['number']} is not passed on")
    return message


def facts_from(text: str) -> dict[str, str]:
    """Return the facts in a message "facts": name -> value. Raises MessageError."""
    try:
        facts: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError("facts: no table") from error
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        raise MessageError("facts: no table of texts")
    return facts


_MISSING = object()


class LineReader:
    """Cuts the bytes of one connection into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[dict[str, Any]]:
        """Return the messages that are complete with these bytes. Raises MessageError, also for a line too long."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > LINE_BYTES or any(len(line) > LINE_BYTES for line in lines):
            raise MessageError(f"a line is longer than {LINE_BYTES} bytes")
        return [decode(line) for line in lines]


def differences(facts: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> list[str]:
    """Return one line for each fact on which ranks differ: its name, each value, and who has it.

    facts: rank -> name -> value; a rank without facts has no part. Equal tables are looked at once if they are one
    object. hosts: rank -> host.
    """
    groups: dict[int, tuple[Mapping[str, str], list[int]]] = {}
    for rank in sorted(rank for rank in facts if facts[rank]):
        groups.setdefault(id(facts[rank]), (facts[rank], []))[1].append(rank)
    lines = []
    for name in sorted({name for table, _ in groups.values() for name in table}):
        ranks_of: dict[str, list[int]] = {}
        for table, ranks in groups.values():
            ranks_of.setdefault(table.get(name, "not set"), []).extend(ranks)
        if len(ranks_of) > 1:
            values = (f"{value} on {_places(ranks, hosts)}" for value, ranks in ranks_of.items())
            lines.append(f"{name}: {', '.join(values)}")
    return lines


def _places(ranks: list[int], hosts: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(hosts[rank] for rank in sorted(ranks)))
    return f"{listed(names, MOST_NAMED)} ({counted_ranks(ranks)})"


def counted_ranks(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(texts, MOST_NAMED)}"
