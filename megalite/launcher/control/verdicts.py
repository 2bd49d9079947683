"""Why a job failed: the first cause among the reports of its ranks, told once and whole, and the others counted."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megalite.launcher.control.failures import FailureReport, first_cause
from megalite.launcher.control.messages import MessageError, Verdict, counted_ranks
from megalite.launcher.control.progress import Activity


def report_from(message: Mapping[str, Any]) -> FailureReport:
    """Return the report in a message "failed", with its time by this machine's clock. Raises MessageError."""
    try:
        report = FailureReport.from_dict(message["report"])
    except ValueError as error:
        raise MessageError(f"failed: {error}") from error
    age = max(0.0, message["sent"] - report.time)
    return replace(report, time=time.time() - age)


def verdict_of(reports: Sequence[FailureReport], world_size: int) -> Verdict:
    """Return the verdict on a job: its first cause. No rank is at fault if all failed alike."""
    first = first_cause(reports)
    if _all_alike(first, reports, world_size):
        return Verdict(first.message, first.exit_code)
    return Verdict(describe_job(reports, world_size), first.exit_code, first.rank, first.node)


def describe_job(reports: Sequence[FailureReport], world_size: int) -> str:
    """Return the failure of a job: its first cause with all that is known, then a line for each kind of other ranks.

    An error for the user that all ranks raised alike is returned as it is, without a rank.
    """
    first = first_cause(reports)
    if _all_alike(first, reports, world_size):
        return first.message
    return "\n  ".join([*_cause(first), *_others(first, reports, world_size)])


def describe_own(own: FailureReport, known: Sequence[FailureReport]) -> str:
    """Return the text of a failed rank that no coordinator answers. known: the reports of other ranks on this host.

    The whole failure if this rank is the first cause among them, else one line.
    """
    if own.secondary:
        return f"{own.who} ends, because it lost another rank ({own.headline})"
    first = first_cause([own, *known])
    if first is own:
        return "\n  ".join(_cause(own))
    verb = "failed alike" if first.cause == own.cause else f"failed too ({own.headline})"
    return f"{own.who} {verb}: see rank {first.rank}"


def describe_end(host: str, verdict: str) -> str:
    """Return the line in which a host that does not show the verdict says why its ranks end."""
    return f"the ranks on {host} end: {verdict.splitlines()[0].rstrip(':')}"


def _all_alike(first: FailureReport, reports: Sequence[FailureReport], world_size: int) -> bool:
    return first.expected and sum(report.cause == first.cause for report in reports) == world_size


def _cause(report: FailureReport) -> list[str]:
    lines = [f"{report.who}: {report.headline}"]
    if report.secondary:
        lines.append("no rank reported another cause: look at the network, and at hosts that are gone")
    if not report.expected:
        lines += [place] if (place := _place(report)) else []
        lines += [f"caused by {report.origin}"] if report.origin else []
        lines += [f"at {frame}" for frame in report.frames]
    return [*lines, *([f"full report: {report.file}"] if report.file else [])]


def _place(report: FailureReport) -> str:
    """Return when a rank failed: "after step 12: reducing gradients, last collective: all_reduce over dp"."""
    known = "last seen " if report.lost else ""
    collective = f"last collective: {report.collective}" if report.collective else ""
    doing = ", ".join(each for each in (report.activity, collective) if each)
    when = "before its first step" if report.step is None else f"after step {report.step}"
    if report.activity == Activity.INFERENCE.value:  # generation and evaluation have no steps
        return known + doing
    if not doing:
        return "" if report.step is None else known + when
    return f"{known}{when}: {doing}"


def _others(first: FailureReport, reports: Sequence[FailureReport], world_size: int) -> list[str]:
    """Return what became of the other ranks, a line for each kind."""
    others = [report for report in reports if report.rank != first.rank]
    lost = [report for report in others if report.lost]
    alike = [report for report in others if report.cause == first.cause and not report.lost]
    differently = [
        report for report in others if not (report.secondary or report.lost or report.cause == first.cause)
    ]
    lines = []
    if lost:
        after = max(report.time for report in lost) - first.time
        hosts = " and ".join(dict.fromkeys(report.node for report in lost))
        lost_ranks = counted_ranks([report.rank for report in lost])
        lines.append(f"{lost_ranks} on {hosts} vanished within {max(after, 0.1):.1f} s of it")
    if alike:
        lines.append(f"{counted_ranks([report.rank for report in alike])} failed alike")
    lines += [f"{report.who} failed too: {report.headline.splitlines()[0]}" for report in differently[:2]]
    if len(differently) > 2:
        lines.append(
            f"{counted_ranks([report.rank for report in differently[2:]])} failed too, each in another way"
        )
    stopped = world_size - 1 - len(lost) - len(alike) - len(differently)
    if stopped > 0:
        lines.append(f"{stopped} other rank{'s' * (stopped > 1)} stopped because of it")
    return lines
