"""Saves the checkpoints of a run, asynchronously where possible; deletes old ones, measures the cost of saving."""

import statistics
import time
from collections import deque
from functools import partial
from pathlib import Path

from megalite.checkpoint.background import BackgroundWriter, Written
from megalite.checkpoint.folder import published_name
from megalite.checkpoint.publish import remove_older, write_best
from megalite.checkpoint.save import write_draft
from megalite.checkpoint.staging import Staging
from megalite.checkpoint.unpublished import Draft
from megalite.config.sections.derived import offload_devices
from megalite.config.sections.schema import RunConfig
from megalite.launcher.control.progress import Activity, progress
from megalite.launcher.process import available_memory_bytes
from megalite.monitor.metrics import SaveMetrics
from megalite.train.checkpoints.resuming import FROM_STEP_0, Resumption
from megalite.train.step.state import StepReport
from megalite.train.step.train_step import TrainStep

# Steps without a save in flight, with which those during a save are compared.
_COMPARED_STEPS = 20
_RECENT_SAVES = 3
# Before a first save is measured: weight, master and two moments, through a slow file system.
_BYTES_PER_PARAMETER = 16
_BYTES_PER_SECOND = 100e6


class RunSaver:
    """Saves the checkpoints of one run; one object a rank, called alike on every rank.

    Its methods return the checkpoints that were published since the last call.
    """

    def __init__(
        self, trainer: TrainStep, folder: Path, start: Resumption = FROM_STEP_0, *, ranks_a_node: int = 1
    ):
        """start: of a checkpoint that is never deleted. ranks_a_node: ranks that share this machine's memory."""
        self._trainer, self._folder, self.resumed_from = trainer, folder, start.saved
        self.copies = start.copies
        self._protected = () if start.saved is None else (start.saved,)
        self._ranks_a_node = ranks_a_node
        self._writer = BackgroundWriter(trainer.mesh)
        self._in_background = saves_in_background(trainer.config)
        self._waited_seconds = 0.0
        self._save_seconds: deque[float] = deque(maxlen=_RECENT_SAVES)
        self._seconds_without_save: deque[float] = deque(maxlen=_COMPARED_STEPS)
        self._seconds_during_save: list[float] = []

    @property
    def busy(self) -> bool:
        """Whether this rank is writing."""
        return self._writer.busy

    @property
    def failed(self) -> bool:
        """Whether this rank has failed to write."""
        return self._writer.failed

    def expected_seconds(self, *, another: bool) -> float:
        """Return how long the last save of the run will take, as long as the slowest of recent ones.

        Includes the wait for a checkpoint in flight. another: a regular checkpoint comes before the last one.
        """
        once = max(self._save_seconds) if self._save_seconds else self._estimated_seconds()
        return once * (2 if another or self._writer.in_flight else 1)

    def save(self, *, at_once: bool) -> list[SaveMetrics]:
        """Save the current state once the checkpoint in flight, if any, is published; collective.

        at_once: the new checkpoint is published when this returns; otherwise it may be written asynchronously.
        Raises CheckpointError on every rank alike.
        """
        progress.begin(Activity.SAVING)
        done = self.finish()
        started, state = time.perf_counter(), self._trainer.state
        if self.copies is not None:
            self.copies.unsaved = False
        draft = self._trainer.draft(self._folder)
        tidy = partial(self._tidy, state.step, state.best_step)
        if not at_once and self._in_background and self._has_room(draft):
            self._writer.start(draft, tidy, stalled=time.perf_counter() - started)
            return done
        write_draft(draft, self._trainer.mesh, tidy)
        seconds = time.perf_counter() - started
        self._save_seconds.append(seconds)
        return [*done, SaveMetrics(state.step, draft.published, seconds, seconds)]

    def before_update(self) -> None:
        """Wait until the checkpoint in flight has its copy of the state; called in every step before it changes."""
        started = time.perf_counter()
        self._writer.before_update()
        if self.copies is not None:
            self.copies.before_update()
        self._waited_seconds = time.perf_counter() - started

    def stepped(self, report: StepReport) -> None:
        """Record the seconds of a finished step, without its wait for the copy of a checkpoint."""
        seconds = report.step_seconds - self._waited_seconds
        (self._seconds_during_save if self._writer.in_flight else self._seconds_without_save).append(seconds)

    def advance(self, *, busy: bool, failed: bool) -> list[SaveMetrics]:
        """Publish the checkpoint in flight once all ranks have written, between two steps; collective.

        busy, failed: `busy` and `failed` of any rank. Raises CheckpointError on every rank alike when any has failed.
        """
        return self._published(self._writer.advance(busy=busy, failed=failed))

    def finish(self) -> list[SaveMetrics]:
        """Wait until the checkpoint in flight is published; collective."""
        return self._published(self._writer.finish())

    def point_to_best(self) -> None:
        """Write `best` at the start: a run may have been killed after saving a checkpoint, before naming it there."""
        if self._trainer.mesh.rank == 0:
            self._point_to(self._trainer.state.best_step)

    def _estimated_seconds(self) -> float:
        numel = sum(tensor.numel() for tensor in self._trainer.replica.tensors.values())
        return numel * _BYTES_PER_PARAMETER / _BYTES_PER_SECOND

    def _tidy(self, step: int, best_step: int | None) -> None:
        """Update `best` and delete old checkpoints, on rank 0, once that of `step` is published.

        best_step: the best step at the time of the save.
        """
        self._point_to(best_step)
        settings = self._trainer.config.checkpoint
        if settings.keep_last is not None:
            keep, every = settings.keep_last, settings.keep_every
            remove_older(self._folder, step, keep=keep, every=every, protected=self._protected)

    def _point_to(self, best_step: int | None) -> None:
        if self._trainer.config.checkpoint.best and best_step is not None:
            write_best(self._folder, published_name(best_step))

    def _published(self, written: Written | None) -> list[SaveMetrics]:
        if written is None:
            return []
        self._save_seconds.append(written.write_seconds)
        during, self._seconds_during_save = self._seconds_during_save, []
        compared = bool(during and self._seconds_without_save)
        return [
            SaveMetrics(
                step=written.step,
                path=written.path,
                stall_seconds=written.stall_seconds,
                write_seconds=written.write_seconds,
                staging_bytes=written.staging_bytes,
                steps_during_write=len(during),
                slowdown=statistics.mean(during) / statistics.median(self._seconds_without_save)
                if compared
                else None,
            )
        ]

    def _has_room(self, draft: Draft) -> bool:
        """Whether the copies of all ranks fit into host memory, less what earlier saves have reserved. Collective."""
        more_bytes = Staging.needed_bytes(draft.tensors) - self._writer.staging_bytes
        available = available_memory_bytes()
        short = more_bytes > 0 and available is not None and more_bytes * self._ranks_a_node > available
        return not self._trainer.mesh.max_over_world(float(short))


def saves_in_background(config: RunConfig) -> bool:
    """Whether checkpoints are asynchronous: not with offload to NVMe, whose state may not fit into host memory."""
    if not config.checkpoint.async_save:
        return False
    if config.zero_stage == 0:
        return True
    return "nvme" not in offload_devices(config.deepspeed_json()["zero_optimization"]).values()
