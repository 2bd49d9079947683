"""The thread that owns the generation engine: takes requests from asyncio, and hands back their events."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.errors import ConfigError
from megalite.generation.batch_engine import IDLE_STEP_SECONDS
from megalite.generation.request import Request

if TYPE_CHECKING:
    from megalite.generation.batch_engine import BatchEngine, Event


class EngineError(Exception):
    """The engine has failed, or has been stopped, with requests in it."""


class EngineJob:
    """The sequences of one HTTP request, in the engine.

    Iterate to get (index of the sequence, event) until each sequence has finished. Raises EngineError.
    """

    def __init__(self, owner: "EngineThread", count: int):
        self._owner, self._left = owner, count
        self._events: asyncio.Queue[tuple[int, Event] | EngineError] = asyncio.Queue()
        self.numbers: list[int] = []
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[list[tuple[int, "Event"]]]:
        return self._batches()

    async def _batches(self) -> AsyncIterator[list[tuple[int, "Event"]]]:
        """Yield the events that have arrived, at least one at a time."""
        while self._left:
            arrived = [await self._events.get()]
            while not self._events.empty():
                arrived.append(self._events.get_nowait())
            events = []
            for item in arrived:
                if isinstance(item, EngineError):
                    raise item
                events.append(item)
                self._left -= item[1].finish is not None
            yield events

    def put(self, item: "tuple[int, Event] | EngineError") -> None:
        """Hand over an event, in asyncio's thread."""
        self._events.put_nowait(item)

    def cancel(self) -> None:
        """Take what is unfinished out of the engine."""
        if self._left and not self.cancelled:
            self.cancelled = True
            self._owner.forget(self)


@dataclass(frozen=True)
class _Start:
    requests: Sequence[Request]
    job: EngineJob
    started: "asyncio.Future[None]"


@dataclass(frozen=True)
class _Cancel:
    job: EngineJob


class EngineThread:
    """Runs `engine` in a thread of its own; nothing else may call it.

    prepare: called there before the first step, such as to set its cores. idle_seconds: without work the thread takes
    an empty step this often, so that the collective in which the other ranks wait does not time out.
    """

    def __init__(
        self,
        engine: "BatchEngine",
        prepare: Callable[[], None] = lambda: None,
        *,
        idle_seconds: float = IDLE_STEP_SECONDS,
    ):
        self._engine, self._prepare, self._idle_seconds = engine, prepare, idle_seconds
        self._commands: queue.SimpleQueue[_Start | _Cancel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._jobs: dict[int, tuple[EngineJob, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()

    def start(self) -> None:
        """Start the thread; call it in the event loop that the requests come from."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step; unfinished jobs end with EngineError."""
        self._commands.put(None)

    async def stopped(self) -> None:
        """Wait for the end of the thread."""
        await asyncio.to_thread(self._thread.join)

    @property
    def running(self) -> bool:
        """Whether the engine can take requests."""
        return self.failure is None and self._thread.is_alive()

    async def submit(self, requests: Sequence[Request]) -> EngineJob:
        """Queue all of `requests`, or none: ConfigError if one can never fit, EngineError if the engine has ended."""
        if self._loop is None or not self.running:
            raise EngineError("the engine has ended")
        job = EngineJob(self, len(requests))
        started = self._loop.create_future()
        self._commands.put(_Start(requests, job, started))
        try:
            await started
        except asyncio.CancelledError:
            job.cancel()
            raise
        return job

    def forget(self, job: EngineJob) -> None:
        """Cancel the sequences of a job."""
        self._commands.put(_Cancel(job))

    def fail(self, error: BaseException) -> None:
        """End all jobs with an error from outside, in asyncio's thread: a rank of the engine has died."""
        if self.failure is None:
            self.failure = error
            self._end_jobs(error)
            self.failed.set()

    def _run(self) -> None:
        try:
            self._prepare()
            while self._obey():
                if events := self._engine.step():
                    self._call(self._deliver, events)
            self._engine.close()
        except BaseException as error:
            self._call(self.fail, error)
        else:
            self._call(self._end_jobs, EngineError("the server stops"))

    def _obey(self) -> bool:
        """Carry out the commands that have come; wait for one if there is no work. Return False at the end."""
        try:
            command = self._commands.get(block=not self._engine.has_work, timeout=self._idle_seconds)
            while True:
                if command is None:
                    return False
                self._carry_out(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True

    def _carry_out(self, command: _Start | _Cancel) -> None:
        if isinstance(command, _Cancel):
            for number in command.job.numbers:
                self._engine.cancel(number)
            self._call(self._forgotten, list(command.job.numbers))
            return
        numbers: list[int] = []
        error: Exception | None = None
        try:
            for request in () if command.job.cancelled else command.requests:
                numbers.append(self._engine.submit(request))
        except ConfigError as refused:
            for number in numbers:
                self._engine.cancel(number)
            numbers, error = [], refused
        # Set here already: a cancellation may be the next command.
        command.job.numbers = numbers
        self._call(self._started, command, error)

    def _started(self, command: _Start, error: Exception | None) -> None:
        for index, number in enumerate(command.job.numbers):
            self._jobs[number] = (command.job, index)
        if command.started.done():
            return
        if error is None:
            command.started.set_result(None)
        else:
            command.started.set_exception(error)

    def _forgotten(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._jobs.pop(number, None)

    def _deliver(self, events: "Sequence[Event]") -> None:
        for event in events:
            place = self._jobs.get(event.number)
            if place is None:
                continue
            job, index = place
            if event.finish is not None:
                del self._jobs[event.number]
            job.put((index, event))

    def _end_jobs(self, error: BaseException) -> None:
        for job in {job for job, _ in self._jobs.values()}:
            job.put(EngineError(str(error)))
        self._jobs.clear()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Start) and not command.started.done():
                command.started.set_exception(EngineError(str(error)))

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in asyncio's thread; not after its loop has closed."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
