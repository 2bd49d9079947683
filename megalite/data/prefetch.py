"""The batches of the steps to come, assembled by threads while a step computes."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class Prefetch(Generic[Batch]):
    """`read(samples)`, what a step works on after so many samples, read ahead of the steps that ask for it.

    A step takes `stride` samples; the run ends before sample `end`. `workers` threads (0: none, each step reads for
    itself) keep up to `depth` steps ready. Threads suffice: copying from a mapped file, and waiting for its disk, hold
    no interpreter lock. `read` must be a pure function of its argument and bear several callers at once.

    Nothing of it is state: whoever asks for another step than the next, as after a resume, gets that one. What `read`
    raises is raised to the step that the batch was for, and by then only once.
    """

    def __init__(self, read: Callable[[int], Batch], *, stride: int, end: int, workers: int, depth: int):
        self._read, self._stride, self._end, self._depth = read, stride, end, depth
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="loader") if workers else None
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()

    def __enter__(self) -> "Prefetch[Batch]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def step_batch(self, samples: int) -> Batch:
        """The batch after `samples` samples; the reading of later ones is under way when this returns."""
        if self._pool is None:
            return self._read(samples)
        if self._ahead and self._ahead[0][0] != samples:
            self._drop()
        if not self._ahead:
            self._ahead.append((samples, self._pool.submit(self._read, samples)))
        while len(self._ahead) <= self._depth and (after := self._ahead[-1][0] + self._stride) < self._end:
            self._ahead.append((after, self._pool.submit(self._read, after)))
        return self._ahead.popleft()[1].result()

    def close(self) -> None:
        """Wait for what is being read at this moment, and read no more ahead."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _drop(self) -> None:
        for _, batch in self._ahead:
            batch.cancel()
        self._ahead.clear()
