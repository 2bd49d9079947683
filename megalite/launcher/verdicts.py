"""The coordinator's view of failures: reports that ranks send, ranks that vanished, and the first cause among them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from megalite.launcher.failures import FailureReport, first_cause
from megalite.launcher.messages import MessageError, Verdict
from megalite.topology.axes import Layout


def report_from(message: Mapping[str, Any]) -> FailureReport:
    """Return the report in a message "failed", with its time by this machine's clock. Raises MessageError."""
    sent = message["report"]
    if not isinstance(sent, dict):
        raise MessageError("failed: the report is not a table")
    known = {each.name for each in fields(FailureReport)}
    try:
        report = FailureReport(**{name: value for name, value in sent.items() if name in known})
        age = max(0.0, float(message["sent"]) - float(report.time))
        return FailureReport(**{**vars(report), "time": time.time() - age, "rank": int(report.rank)})
    except (TypeError, ValueError) as error:
        raise MessageError(f"failed: {error}") from error


def of_lost(
    rank: int,
    layout: Layout | None,
    *,
    host: str,
    pid: int,
    job: str,
    step: int | None,
    activity: str,
    reason: str,
) -> FailureReport:
    """Return the report of a rank whose connection ended without a word. reason: the system's, "" for a plain end."""
    after = "before its first step" if step is None else f"after step {step}"
    doing = f", while {activity}" if activity else ""
    why = f" (its connection: {reason})" if reason else ""
    return FailureReport(
        rank=rank,
        coordinates=vars(layout.coordinates(rank)) if layout is not None else {},
        node=host,
        pid=pid,
        job=job,
        time=time.time(),
        exception="",
        message=f"vanished (pid {pid}), last seen {after}{doing}{why}: killed, out of memory, or its host is gone",
    )


def verdict_of(reports: Sequence[FailureReport], layout: Layout | None) -> Verdict:
    """Return the verdict on a job: its first cause."""
    first = first_cause(reports)
    name = layout.describe(first.rank) if layout is not None else f"rank {first.rank}"
    lines = [f"{name} on {first.node}: {first.headline}"]
    if not first.expected:
        lines += [f"at {frame}" for frame in first.frames]
    return Verdict("\n  ".join(lines), first.exit_code, first.rank, first.node)
