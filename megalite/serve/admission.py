"""Decides which requests enter: the limit on sequences that run or wait, and the end of the server."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from megalite.serve.errors import ApiError

_RETRY = {"Retry-After": "1"}


class Admission:
    """Counts the sequences of all unfinished requests. capacity: the most of them. empty: set while there are none."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self.active = 0
        self.draining = False
        self.empty = asyncio.Event()
        self.empty.set()

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Hold `count` sequences within the `with` block. ApiError 429 without room, 503 while the server stops."""
        if self.draining:
            raise ApiError(503, "the server stops; ask another one", code="server_stops", headers=_RETRY)
        if self.active + count > self._capacity:
            raise ApiError(
                429,
                f"{self.active} sequences run or wait, and {count} more exceed the server's {self._capacity}; "
                "try again later",
                code="queue_full",
                headers=_RETRY,
            )
        self.active += count
        self.empty.clear()
        try:
            yield
        finally:
            self.active -= count
            if self.active == 0:
                self.empty.set()
