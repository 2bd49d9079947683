"""An ordered map over worker processes, in bounded memory."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Generic, TypeVar

from megalite.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

# Items per worker that may be ahead of the slowest result.
_LEAD = 4
_STOP_SECONDS = 5.0
_WAITING_SECONDS = 1.0
# OSError: the pipe ended in the middle of a message.
_PARENT_GONE = (EOFError, OSError)
# Not multiprocessing's own start of a process: that one imports the user's script, which would start training again,
# and complains with a traceback where its parent is gone before it has begun.
_CODE = "import sys; sys.path = sys.argv[2:]; from megalite.data.files.workers import serve; serve(int(sys.argv[1]))"


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int,
    waiting: Callable[[], None] = lambda: None,
) -> Iterator[Result]:
    """Yield function(item) for every item, in order, computed by `workers` processes; 0: in this process.

    `function`, items and results must be picklable. Workers are new interpreters, which is safe with threads in this
    process; they import only what `function` needs, and end with this process, however it ends. waiting: called each
    second without a result.
    Raises the exceptions of `function`, and WorkerDied if a worker process died.
    """
    if workers == 0:
        yield from map(function, items)
        return
    pool: list[_Worker[Item, Result]] = []
    try:
        for _ in range(workers):
            pool.append(_Worker(function))
        yield from _dispatch(pool, items, waiting)
    finally:
        for worker in pool:
            worker.close()
        for worker in pool:
            worker.join()


class WorkerDied(DataError):
    """A worker process ended before its work did; the results before that are valid."""


class _Worker(Generic[Item, Result]):
    """A process that answers one item at a time over a pipe."""

    def __init__(self, function: Callable[[Item], Result]):
        self.connection, theirs = Pipe()
        command = [sys.executable, "-c", _CODE, str(theirs.fileno()), *map(str, sys.path)]
        # Ctrl-C reaches the whole process group, also a worker that is still to ignore it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        except OSError as error:
            raise DataError(f"cannot start a worker process ({error.strerror}); use fewer workers") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            # The child does not inherit our end, so closing either end gives the other process EOF.
            theirs.close()
        self.send(function)

    def send(self, item: Item | Callable[[Item], Result]) -> None:
        try:
            self.connection.send(item)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error

    def receive(self) -> Result:
        try:
            result, failure = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if failure is not None:
            raise failure
        answer: Result = result
        return answer

    def close(self) -> None:
        self.connection.close()

    def join(self) -> None:
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _died(self) -> WorkerDied:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        code = self._process.returncode
        cause = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return WorkerDied(
            f"a worker process died ({cause}); if memory ran out, use fewer workers (data.workers, --workers)"
        )


def _dispatch(
    pool: list[_Worker[Item, Result]], items: Iterable[Item], waiting: Callable[[], None]
) -> Iterator[Result]:
    idle = list(pool)
    busy: dict[Connection, tuple[_Worker[Item, Result], int]] = {}
    finished: dict[int, Result] = {}
    yielded = count = 0
    for index, item in enumerate(items):
        while not idle or index - yielded >= _LEAD * len(pool):
            _collect(busy, idle, finished, waiting)
            while yielded in finished:
                yield finished.pop(yielded)
                yielded += 1
        worker = idle.pop()
        worker.send(item)
        busy[worker.connection] = (worker, index)
        count = index + 1
    while yielded < count:
        if yielded in finished:
            yield finished.pop(yielded)
            yielded += 1
        else:
            _collect(busy, idle, finished, waiting)


def _collect(
    busy: dict[Connection, tuple[_Worker[Item, Result], int]],
    idle: list[_Worker[Item, Result]],
    finished: dict[int, Result],
    waiting: Callable[[], None],
) -> None:
    """Wait until a worker has answered, and collect all available answers."""
    while not (ready := wait(list(busy), timeout=_WAITING_SECONDS)):
        waiting()
    for connection in ready:
        assert isinstance(connection, Connection)
        worker, index = busy.pop(connection)
        finished[index] = worker.receive()
        idle.append(worker)


def serve(handle: int) -> None:
    """In a worker: answer items over the pipe with this file number until it closes, also before the function came."""
    # The parent ends its workers by closing their pipes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    connection = Connection(handle)
    try:
        function = connection.recv()
    except _PARENT_GONE:
        return
    while True:
        try:
            item = connection.recv()
        except _PARENT_GONE:
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
