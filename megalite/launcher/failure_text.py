"""The text of a failed job: the first cause, complete and once, the other ranks in a line, and a line for each host."""

from collections.abc import Sequence

from megalite.launcher.failures import FailureReport, first_cause


def describe_job(reports: Sequence[FailureReport], world_size: int) -> str:
    """Return the failure of a job: its first cause with all that is known, then the count of the other ranks.

    An error for the user that all ranks raised alike is returned as it is, without a rank.
    """
    first = first_cause(reports)
    alike = sum(report.cause == first.cause for report in reports)
    if first.expected and alike == world_size:
        return first.message
    return "\n  ".join([*_cause(first), *_others(first, reports, world_size)])


def describe_own(own: FailureReport, known: Sequence[FailureReport]) -> str:
    """Return the text of a failed rank whose job nobody judges. known: the reports of other ranks on this host.

    The whole failure if this rank is the first cause among them, else one line.
    """
    if own.secondary:
        return f"{own.who} stopped because it lost another rank ({own.headline})"
    first = first_cause([own, *known])
    if first is own:
        return "\n  ".join(_cause(own))
    verb = "failed alike" if first.cause == own.cause else f"failed too ({own.headline})"
    return f"{own.who} {verb}: see rank {first.rank}"


def describe_end(host: str, verdict: str) -> str:
    """Return the line in which a host that does not show the verdict says why its ranks end."""
    return f"{host}: the ranks on this host end, because of {verdict.splitlines()[0].rstrip(':')}"


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
    """Return when in the run a rank failed: "after step 12: reducing gradients; last collective: all_reduce over dp"."""
    parts = []
    if report.step is not None:
        parts.append(f"after step {report.step}" + (f": {report.activity}" if report.activity else ""))
    elif report.activity:
        parts.append(f"before its first step: {report.activity}")
    if report.collective:
        parts.append(f"last collective: {report.collective}")
    return "; ".join(parts)


def _others(first: FailureReport, reports: Sequence[FailureReport], world_size: int) -> list[str]:
    """Return what became of the other ranks, a line for each kind."""
    others = [report for report in reports if report.rank != first.rank]
    lost = [report for report in others if report.lost]
    alike = [report for report in others if report.cause == first.cause and not report.lost]
    differently = [report for report in others if not (report.secondary or report.lost or report in alike)]
    lines = []
    if lost:
        after = max(report.time for report in lost) - first.time
        hosts = " and ".join(dict.fromkeys(report.node for report in lost))
        lines.append(f"{_ranks(lost)} on {hosts} vanished within {max(after, 0.1):.1f} s of it")
    if alike:
        lines.append(f"{_ranks(alike)} failed alike")
    lines += [f"{report.who} failed too: {report.headline.splitlines()[0]}" for report in differently[:2]]
    if len(differently) > 2:
        lines.append(f"{_ranks(differently[2:])} failed too, each in another way")
    stopped = world_size - 1 - len(lost) - len(alike) - len(differently)
    if stopped > 0:
        lines.append(f"{stopped} other rank{'s' * (stopped > 1)} stopped because of it")
    return lines


def _ranks(reports: Sequence[FailureReport]) -> str:
    numbers = [str(report.rank) for report in sorted(reports, key=lambda report: report.rank)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = numbers if len(numbers) <= 8 else [*numbers[:8], f"{len(numbers) - 8} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
