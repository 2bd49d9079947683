"""Runs the application on its sockets, from the first request to the end of the last."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import uvicorn

from megalite.serve.app import Service

log = logging.getLogger("megalite.serve")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_KEEP_ALIVE_SECONDS = 30
# After a failure /health still says why; the launching process may end this one before.
_FAILED_SECONDS = 1.0
_CLOSE_SECONDS = 2
_LONGEST_HEAD = 32 * 2**10


async def run_server(
    service: Service,
    sockets: Sequence[socket.socket],
    *,
    on_ready: Callable[[int], None],
    peers: Mapping[int, int] | None = None,
) -> None:
    """Serve until a signal of STOP_SIGNALS, and then drain; a second one ends the running requests too.

    on_ready: called with the port once requests are taken. peers: the processes of the engine's other ranks.
    Raises the error that ended the engine.
    """
    engine = service.engine
    server = _Server(_config(service))
    engine.start()
    serving = asyncio.create_task(server.serve(sockets=list(sockets)))
    watch = PeerWatch(peers or {}, lambda rank: engine.fail(ConnectionResetError(f"rank {rank} has ended")))
    try:
        with _signals() as stops:
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            on_ready(sockets[0].getsockname()[1])
            await _first(stops.first, engine.failed)
            if not engine.failed.is_set():
                await _drain(service, stops)
    finally:
        watch.close()
        if engine.failed.is_set():
            await asyncio.sleep(_FAILED_SECONDS)
        engine.stop()
        # Requests that were not finished in time get their error before the connections close.
        server.should_exit = True
        await serving
    if engine.failure is not None:
        # Its thread may still wait for a rank that has ended.
        raise engine.failure
    await engine.stopped()


async def _drain(service: Service, stops: "_Stops") -> None:
    """Take no more requests, and wait until the running ones have ended or their time has."""
    service.admission.draining = True
    log.info("stopping; %d sequences run or wait", service.admission.active)
    with suppress(TimeoutError):
        async with asyncio.timeout(service.settings.drain_seconds):
            await _first(stops.second, service.engine.failed, service.admission.empty)


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


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would raise the signal again at the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        service.app(),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        # A connection that asks counts itself.
        limit_concurrency=service.settings.max_connections + 1,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        h11_max_incomplete_event_size=_LONGEST_HEAD,
    )


class _Stops:
    """The signals that ask the server to end. first, second: set by the first and the second of them."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    def note(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def _signals() -> Iterator[_Stops]:
    """Handle STOP_SIGNALS within the `with` block, in the main thread; elsewhere signals are not ours."""
    stops, loop = _Stops(), asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stops.note)
    try:
        yield stops
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
