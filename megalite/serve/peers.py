"""Notices that another rank of the engine has ended, before a collective fails."""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress


class PeerWatch:
    """Calls `ended` with the rank once a process ends; use it within an event loop. pids: rank -> process."""

    def __init__(self, pids: Mapping[int, int], ended: Callable[[int], None]):
        self._loop = asyncio.get_running_loop()
        self._files: list[int] = []
        for rank, pid in pids.items():
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                ended(rank)
                continue
            except OSError:
                continue  # a kernel without pidfd: the engine's next collective tells
            self._files.append(file)
            self._loop.add_reader(file, self._ended, file, rank, ended)

    def close(self) -> None:
        """Stop watching."""
        for file in self._files:
            self._loop.remove_reader(file)
            with suppress(OSError):
                os.close(file)
        self._files.clear()

    def _ended(self, file: int, rank: int, ended: Callable[[int], None]) -> None:
        self._loop.remove_reader(file)
        ended(rank)
