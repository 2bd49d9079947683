"""Reads the batches of coming steps in threads while a step computes."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class Prefetch(Generic[Batch]):
    """Calls `read(consumed_samples)` for the batches of coming steps ahead of time.

    read: a pure and thread-safe function. stride: the samples of a step. end: the last step ends before this sample.
    workers: threads; 0: each step reads for itself. depth: the number of steps to keep ready.

    Threads suffice, because copies from a memory-mapped file and disk reads release the GIL. A request for another step
    than the next, as after a resume, is served as well. An exception of `read` reaches the step of that batch.
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

    def step_batch(self, consumed_samples: int) -> Batch:
        """Return the batch after `consumed_samples`; later batches are being read when this returns."""
        if self._pool is None:
            return self._read(consumed_samples)
        if self._ahead and self._ahead[0][0] != consumed_samples:
            self._drop()
        if not self._ahead:
            self._ahead.append((consumed_samples, self._pool.submit(self._read, consumed_samples)))
        while len(self._ahead) <= self._depth and (after := self._ahead[-1][0] + self._stride) < self._end:
            self._ahead.append((after, self._pool.submit(self._read, after)))
        return self._ahead.popleft()[1].result()

    def close(self) -> None:
        """Wait for the reads in progress, and stop reading ahead."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _drop(self) -> None:
        for _, batch in self._ahead:
            batch.cancel()
        self._ahead.clear()
