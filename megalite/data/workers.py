"""A map over worker processes, results in the order of the items and memory bounded."""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Generic, TypeVar

from megalite.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

# Results that may wait for a slower one before them, a worker.
_LEAD = 4
_STOP_SECONDS = 5.0


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int
) -> Iterator[Result]:
    """function(item) for every item, in order, by `workers` processes beside this one; 0: here.

    `function`, items and results must pickle. Workers start fresh (spawn: safe whatever threads this process
    runs), import what `function` needs only, and end when this process does, however it ends.
    Raises what `function` raised, and DataError when a worker died.
    """
    if workers == 0:
        yield from map(function, items)
        return
    pool: list[_Worker[Item, Result]] = []
    try:
        for _ in range(workers):
            pool.append(_Worker(function))
        yield from _dispatch(pool, items)
    finally:
        for worker in pool:
            worker.close()
        for worker in pool:
            worker.join()


class WorkerDied(DataError):
    """A worker process ended before its work did; what was done until then is good."""


class _Worker(Generic[Item, Result]):
    """A process that answers one item at a time over a pipe."""

    def __init__(self, function: Callable[[Item], Result]):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(function, theirs), daemon=True)
        try:
            with _without_main():
                self._process.start()
        except OSError as error:
            raise DataError(f"cannot start a worker process ({error.strerror}); use fewer workers") from error
        finally:
            # With our copy closed, its death is an end of file here; it has no copy of our end, so ours is one there.
            theirs.close()

    def send(self, item: Item) -> None:
        try:
            self.connection.send(item)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error

    def receive(self) -> Result:
        try:
            result, failure = self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died() from error
        if failure is not None:
            raise failure
        answer: Result = result
        return answer

    def close(self) -> None:
        self.connection.close()

    def join(self) -> None:
        self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _died(self) -> WorkerDied:
        self._process.join(_STOP_SECONDS)
        code = self._process.exitcode
        cause = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return WorkerDied(
            f"a worker process died ({cause}); if memory ran out, use fewer workers (data.workers, --workers)"
        )


def _dispatch(pool: list[_Worker[Item, Result]], items: Iterable[Item]) -> Iterator[Result]:
    idle = list(pool)
    busy: dict[Connection, tuple[_Worker[Item, Result], int]] = {}
    finished: dict[int, Result] = {}
    given = count = 0
    for index, item in enumerate(items):
        while not idle or index - given >= _LEAD * len(pool):
            _collect(busy, idle, finished)
            while given in finished:
                yield finished.pop(given)
                given += 1
        worker = idle.pop()
        worker.send(item)
        busy[worker.connection] = (worker, index)
        count = index + 1
    while given < count:
        if given in finished:
            yield finished.pop(given)
            given += 1
        else:
            _collect(busy, idle, finished)


def _collect(
    busy: dict[Connection, tuple[_Worker[Item, Result], int]],
    idle: list[_Worker[Item, Result]],
    finished: dict[int, Result],
) -> None:
    """Wait until a worker has answered, and take every answer there is."""
    for connection in wait(list(busy)):
        assert isinstance(connection, Connection)
        worker, index = busy.pop(connection)
        finished[index] = worker.receive()
        idle.append(worker)


@contextmanager
def _without_main() -> Iterator[None]:
    """A spawned process runs the program of the one that started it anew, to know its names. It needs none of them
    here, and a user's script that trains would train there too."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    # Ctrl-C reaches the whole process group; the parent ends its workers by closing their pipes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        answer: tuple[Any, Exception | None]
        try:
            answer = (function(item), None)
        except Exception as error:
            answer = (None, error)
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
