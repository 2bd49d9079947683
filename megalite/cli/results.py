"""The one place that decides between text for a person and one JSON document for a program (`--json`).

With --json all that a command prints goes to stderr, and its facts to one document on stdout. Ranks that are forked
from this process report into a file; its own facts are kept in memory, where no full disk loses them.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import IO, Any

from megalite.errors import MegaliteError, Problem, disk_error

_BROKEN_PIPE, _WRITTEN = 141, "_written"
# While a command runs with --json: the facts of forked ranks, a JSON object a line, and the real stdout.
_streams: tuple[IO[str], IO[str]] | None = None
# The facts of the process with this id.
_own: tuple[int, dict[str, Any]] = (0, {})


def wanted() -> bool:
    """Whether a program reads the result."""
    return _streams is not None


def report(**facts: Any) -> None:
    """Add facts to the document of --json; do nothing for a person, who reads what the command prints."""
    if _streams is not None and os.getpid() == _own[0]:
        _own[1].update(json.loads(_dumped(facts)))
    elif _streams is not None:
        print(_dumped(facts), file=_streams[0], flush=True)


def report_now(**facts: Any) -> None:
    """Write the document now: the command goes on working, as a server does."""
    if _streams is not None:
        _write({"exit_code": None, **_facts(), **facts})
        report(**{_WRITTEN: True})


def report_error(problems: tuple[Problem, ...], message: str, exit_code: int) -> None:
    """Add an error: all its problems as objects, and the message that a person reads."""
    objects = [problem.as_dict() for problem in problems]
    report(error={"exit_code": exit_code, "message": message, "problems": objects})


def with_document(work: Callable[[], int]) -> int:
    """Run a command with its texts on stderr and its one document on stdout; return its exit code."""
    global _streams, _own
    with _texts_on_stderr() as out, _ranks_file() as facts:
        _streams, _own = (facts, out), (os.getpid(), {})
        try:
            return _end(_finished(work))
        except Exception as error:  # a fault of megalite: its traceback follows on stderr
            report_error((Problem("", f"{type(error).__name__}: {error}"),), str(error), 1)
            _end(1)
            raise
        finally:
            _streams = None


def _ranks_file() -> IO[str]:
    """Return a new file for the facts of ranks: in memory where the system has such files, as Linux does."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("megalite-json"), "w+", encoding="utf-8")
    from tempfile import TemporaryFile

    return TemporaryFile("w+", encoding="utf-8")


def _end(code: int) -> int:
    """Write the document, unless the command has written it and all went well; return the exit code."""
    facts = _facts()
    if facts.pop(_WRITTEN, False) and "error" not in facts:
        return code
    written = _write({"exit_code": code, **facts})
    return code or written


def _finished(work: Callable[[], int]) -> int:
    try:
        return work()
    except SystemExit as left:  # argparse's way to leave
        return left.code if isinstance(left.code, int) else int(left.code is not None)


def error_of(error: MegaliteError) -> None:
    """Report an error that was raised on purpose."""
    report_error(error.problems, str(error), error.exit_code)


def _facts() -> dict[str, Any]:
    assert _streams is not None
    file, merged = _streams[0], dict[str, Any]()
    file.seek(0)
    for line in file:
        merged |= json.loads(line)
    return merged | _own[1]


def _write(document: dict[str, Any]) -> int:
    """Write a document as one line; return 141 where the reader has gone, and 2 where the disk is full."""
    assert _streams is not None
    try:
        print(_dumped(document), file=_streams[1], flush=True)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # the latter of a terminal that has closed
            return _BROKEN_PIPE
        error.filename = "standard output"
        if (refused := disk_error(error)) is None:
            raise
        print(f"error: {refused}", file=sys.stderr)
        return refused.exit_code
    return 0


def _dumped(document: dict[str, Any]) -> str:
    """Return the document in strict JSON: null for a number that is not finite, text for a path."""
    text = json.dumps(document, default=lambda value: value.item() if hasattr(value, "item") else str(value))
    return json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)


@contextmanager
def _texts_on_stderr() -> Iterator[IO[str]]:
    """Send this process's stdout, and that of the processes it starts, to stderr; yield the real stdout."""
    own = sys.stdout
    own.flush()
    kept = os.dup(1)
    try:
        own_is_1 = own.fileno() == 1
    except (UnsupportedOperation, OSError, AttributeError):
        own_is_1 = False
    out = os.fdopen(os.dup(kept), "w", encoding="utf-8") if own_is_1 else own
    with ExitStack() as stack:
        # A service manager may have closed stderr.
        texts = sys.stderr or stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        os.dup2(2 if sys.stderr else texts.fileno(), 1)
        try:
            stack.enter_context(redirect_stdout(texts))
            yield out
        finally:
            texts.flush()
            os.dup2(kept, 1)
            os.close(kept)
            if own_is_1:
                with suppress(OSError):
                    out.close()
