"""Asynchronous checkpoints: a thread of each rank writes a copy of its state, and rank 0's publishes the whole.

Only an update changes the state, so the copy runs during the next step's forward and backward, and only the update
waits for it. No thread takes part in a collective: ranks agree between two steps, in their main threads, on
whether all have written; then rank 0's thread publishes. One checkpoint is in flight at a time: a second one waits.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from megalite.checkpoint.failures import explain
from megalite.checkpoint.publish import remove_stale
from megalite.checkpoint.staging import Staging
from megalite.checkpoint.unpublished import Draft
from megalite.errors import CheckpointError
from megalite.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class Written:
    """A checkpoint that a thread has published, and its cost; the costs of all ranks are known to rank 0 alone.

    stall_seconds: how long rank 0's training waited for it. write_seconds: from the start of the copy until the slowest
    rank's file was on the disk. staging_bytes: the copy, of the rank that has most.
    """

    step: int
    path: Path
    stall_seconds: float
    write_seconds: float
    staging_bytes: int


class _Stopped(Exception):
    """Another rank failed, so this rank stops writing."""


class BackgroundWriter:
    """Writes drafts while training goes on; one object a rank, called alike on every rank from its main thread."""

    def __init__(self, mesh: ParallelMesh):
        self._mesh = mesh
        self._staging = Staging()
        self._draft: Draft | None = None
        self._publishing = False
        self._then: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._stop = threading.Event()
        self._table = ""
        self._failure: Exception | None = None
        self._cost = Written(0, Path(), 0.0, 0.0, 0)
        self._stall_seconds = 0.0

    @property
    def in_flight(self) -> bool:
        """The same on every rank."""
        return self._draft is not None

    @property
    def staging_bytes(self) -> int:
        """The memory that this rank holds for copies."""
        return self._staging.size_bytes

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether this rank's thread has failed."""
        return self._failure is not None

    def start(self, draft: Draft, then: Callable[[], None], *, stalled: float = 0.0) -> None:
        """Begin to write a draft; no other may be in flight.

        then: called by rank 0's thread after publishing. stalled: seconds that training has waited already.
        """
        started = time.perf_counter()
        self._draft, self._then, self._publishing = draft, then, False
        self._copied.clear()
        targets = self._staging.begin(draft.tensors)
        self._run(lambda: self._write(draft, targets))
        self._stall_seconds = stalled + time.perf_counter() - started

    def before_update(self) -> None:
        """Wait until the state has been copied; returns at once if no checkpoint is in flight."""
        if self._draft is None:
            return
        started = time.perf_counter()
        self._copied.wait()
        self._staging.hold_update()
        self._stall_seconds += time.perf_counter() - started

    def advance(self, *, busy: bool, failed: bool) -> Written | None:
        """Advance the checkpoint in flight, and return it once it is published. Collective.

        busy, failed: whether any rank is. Raises CheckpointError on every rank alike when any has failed; older
        checkpoints are as they were.
        """
        if self._draft is None or (busy and not failed):
            return None
        started = time.perf_counter()
        if failed:
            self._give_up(self._draft)
        if not self._publishing:
            self._publish(self._draft)
            self._stall_seconds += time.perf_counter() - started
            return None
        self._draft = None
        return replace(self._cost, stall_seconds=self._stall_seconds)

    def finish(self) -> Written | None:
        """Wait until the checkpoint in flight is published. Collective."""
        started, done = time.perf_counter(), None
        while self._draft is not None:
            if self._thread is not None:
                self._thread.join()
            failed = bool(self._mesh.max_over_world(float(self.failed)))
            self._stall_seconds += time.perf_counter() - started
            done = self.advance(busy=False, failed=failed)
            started = time.perf_counter()
        return done

    def _run(self, action: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                action()
            # Whatever it is: the main thread raises it.
            except Exception as error:
                self._failure = error
            finally:
                self._copied.set()

        # A daemon: a run that is ended does not wait for its checkpoint.
        self._thread = threading.Thread(target=guarded, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, draft: Draft, targets: Mapping[str, Tensor]) -> None:
        started = time.perf_counter()
        self._staging.fill()
        self._copied.set()
        self._staging.wait_for_device()

        def read(key: str) -> Tensor:
            if self._stop.is_set():
                raise _Stopped
            return targets[key]

        self._table = draft.write(read)
        self._cost = Written(
            draft.step, draft.published, 0.0, time.perf_counter() - started, self._staging.size_bytes
        )

    def _publish(self, draft: Draft) -> None:
        """Once every rank has written."""
        written = self._mesh.gather_objects((self._table, self._cost))
        self._publishing, self._thread = True, None
        if written is None:
            return
        tables, costs = [table for table, _ in written], [cost for _, cost in written]
        self._cost = replace(
            self._cost,
            write_seconds=max(cost.write_seconds for cost in costs),
            staging_bytes=max(cost.staging_bytes for cost in costs),
        )

        def publish() -> None:
            draft.publish(tables)
            self._then()

        self._run(publish)

    def _give_up(self, draft: Draft) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        cause, text = self._failure, None
        if cause is not None and not isinstance(cause, _Stopped):
            text = explain(self._mesh, "publish" if self._publishing else "write", draft.path)(cause)
        failures = [each for each in self._mesh.gather_objects(text) or [] if each is not None]
        first = self._mesh.broadcast_object(failures[0] if failures else None)
        self._draft = self._thread = self._failure = None
        if self._mesh.rank == 0:
            remove_stale(draft.partial.parent)
        raise CheckpointError(first) from cause
