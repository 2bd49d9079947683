"""The end of one attempt of a job, with the progress that its run folder shows: it decides about a restart."""

import logging
from pathlib import Path

from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.config.sections.schema import RunConfig
from megalite.errors import CheckpointError
from megalite.launcher.hosts.restarts import Ended
from megalite.monitor.jsonl import newest_records

_RECORDS = "metrics.jsonl"

logger = logging.getLogger(__name__)


def attempt_end(exit_code: int, cause: str, step: int | None, run_folder: Path, before: int) -> Ended:
    """Return how an attempt ended; step: the last one that its ranks told, before: `records_mark` at its start.

    The run folder is read as this machine sees it; where it is not shared, steps are those that ranks told.
    """
    steps = [each for each in (step, _recorded_step(run_folder, before)) if each is not None]
    return Ended(exit_code, cause, max(steps, default=None), published_step(run_folder))


def published_step(run_folder: Path) -> int | None:
    """Return the step of the newest whole checkpoint; None without one."""
    try:
        latest = find_latest(run_folder / "checkpoints")
        return None if latest is None else read_manifest(latest).step
    except CheckpointError as error:
        logger.warning(str(error))
        return None


def has_own_state(config: RunConfig, run_folder: Path, older: int | None, step: int | None) -> bool:
    """Whether a restart can go on from what this run has kept, which checkpoint.resume may pass over.

    older: the newest checkpoint before the first attempt. step: the last one of all attempts, None: there was none.
    """
    published = published_step(run_folder)
    if published is not None:
        return published != older
    # Without a checkpoint "auto" finds the copies in memory, or starts at step 0 as "never" does.
    checkpoint = config.checkpoint
    seen = (
        step is not None and records_mark(run_folder) > 0
    )  # else another host may have another run's checkpoint
    return seen and checkpoint.resume == "never" and checkpoint.in_memory_every > 0


def records_mark(run_folder: Path) -> int:
    """Return a number that changes with every record of metrics.jsonl; 0 without that file."""
    try:
        return (run_folder / _RECORDS).stat().st_mtime_ns
    except OSError:
        return 0


def _recorded_step(run_folder: Path, before: int) -> int | None:
    """Return the last step of metrics.jsonl, which has every step; None if this attempt wrote none."""
    if records_mark(run_folder) == before:
        return None
    newest = next(newest_records(run_folder / _RECORDS), None)
    return None if newest is None else int(newest["step"])
